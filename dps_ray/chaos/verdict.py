"""From what was seen of each kill to figures and a verdict."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dps_ray.chaos.faults import Fault, Kill
from dps_ray.chaos.load import Ending, Record
from dps_ray.chaos.watch import Restores
from dps_ray.report import Report, aligned

OUT_OF_ROUTING_S = 1.0
NOTICE_S = 6.0
"""Two health checks and the way to the routers, on a busy machine."""
REASONS_SHOWN = 5


@dataclass
class Aftermath:
    """What followed one kill."""

    kill: Kill
    out_of_routing_s: float | None = None
    """Time until no router would send the dead replica anything, as the controller tells it."""
    gone: frozenset[str] = frozenset()
    """Replicas that have left routing."""
    returned: bool = False
    """One of them was in routing again later."""
    full_strength_s: float | None = None
    """Time until as many replicas serve as before, and a new process has the dead one's place."""
    records: list[Record] = field(default_factory=list)
    """Requests that ended between this kill and the next."""

    def count(self, ending: Ending) -> int:
        return sum(record.ending is ending for record in self.records)

    @property
    def resent(self) -> int:
        """Requests sent again by their clients, whose connection had broken before any byte."""
        return sum(record.resent > 0 for record in self.records)

    def as_dict(self) -> dict[str, Any]:
        return {
            "fault": self.kill.fault.value,
            "out_of_routing_s": _rounded(self.out_of_routing_s),
            "returned": self.returned,
            "full_strength_s": _rounded(self.full_strength_s),
            "requests": len(self.records),
            **{ending.value: self.count(ending) for ending in Ending},
            "resent": self.resent,
            "slowest_s": _rounded(
                max((r.ended_s - r.started_s for r in self.records), default=None)
            ),
            "reasons": reasons(self.records),
        }


def share_out(records: Sequence[Record], aftermaths: Sequence[Aftermath]) -> list[Record]:
    """Give every request to the latest kill before its end; return those that ended before all."""
    before: list[Record] = []
    for record in sorted(records, key=lambda record: record.ended_s):
        blamed = [each for each in aftermaths if each.kill.at_s <= record.ended_s]
        (blamed[-1].records if blamed else before).append(record)
    return before


def reasons(records: Sequence[Record]) -> dict[str, int]:
    """The most frequent reasons of requests that were not answered in full."""
    counts = Counter(f"{r.ending.value}: {r.reason}" for r in records if r.ending is not Ending.OK)
    return dict(counts.most_common(REASONS_SHOWN))


def judge(
    report: Report,
    aftermaths: Sequence[Aftermath],
    before: Sequence[Record],
    restores: Restores,
    *,
    left_behind: Sequence[str],
    lease_limit: int,
    hung_after_s: float,
    out_of_routing_s: float = OUT_OF_ROUTING_S,
) -> None:
    """Fill in a report.

    Parameters
    ----------
    report
        Receives checks and figures.
    aftermaths, before
        The kills with their requests, and the requests before the first kill.
    restores
        What the engines' pages showed.
    left_behind
        Titles of processes beyond those that the fleet had at the start.
    lease_limit
        Replicas that may restore at once.
    hung_after_s
        When the fleet gives up an engine that hangs, seconds.
    out_of_routing_s
        Longest time until nobody would send a replica anything that is dead for another reason.
    """
    report.check(
        "before the first kill every request was answered",
        bool(before) and all(record.ending is Ending.OK for record in before),
    )
    records = [*before, *(record for each in aftermaths for record in each.records)]
    for each in aftermaths:
        name, at_s = each.kill.fault.value, each.kill.at_s
        # Without one the checks below would hold for a fleet that nobody asked anything.
        report.check(
            f"{name}: a request was open at the kill",
            any(record.started_s < at_s < record.ended_s for record in records),
        )
        report.check(f"{name}: no answer was wrong", each.count(Ending.WRONG) == 0)
        report.check(f"{name}: no request hung", each.count(Ending.HUNG) == 0)
        if each.kill.fault is not Fault.INGRESS:
            report.check(
                f"{name}: no request without a token was lost", each.count(Ending.LOST) == 0
            )
        report.check(f"{name}: back at full strength", each.full_strength_s is not None)
        if each.kill.fault.hits_replica:
            out_s = each.out_of_routing_s
            hangs = each.kill.fault is Fault.HANG
            limit_s = hung_after_s + NOTICE_S if hangs else out_of_routing_s
            report.check(
                f"{name}: out of routing within {limit_s:g} s",
                out_s is not None and out_s < limit_s,
            )
            report.check(f"{name}: stayed out of routing", not each.returned)
        if not each.kill.fault.hits_connection:
            report.check(
                f"{name}: no connection broke", not each.resent and not each.count(Ending.CUT)
            )
        if each.kill.fault is Fault.CONTROLLER:
            report.check(
                f"{name}: every request was answered", each.count(Ending.OK) == len(each.records)
            )
    report.check(
        f"never more than {lease_limit} replica at once had a permit to restore",
        restores.most_permitted <= lease_limit and restores.most_at_once <= lease_limit,
    )
    report.check("replicas went fast and came back", restores.returns > 0)
    report.check("no process was left behind", not left_behind)
    report.figures["before"] = {"requests": len(before), "reasons": reasons(before)}
    report.figures["faults"] = [each.as_dict() for each in aftermaths]
    report.figures["restores"] = {
        "returns_to_full": restores.returns,
        "most_at_once": restores.most_at_once,
        "most_permitted": restores.most_permitted,
        "most_fast": restores.most_fast,
    }
    report.figures["left_behind"] = list(left_behind)


COLUMNS = (
    "fault",
    "out_of_routing_s",
    "full_strength_s",
    "requests",
    *(ending.value for ending in Ending),
    "resent",
    "slowest_s",
)


def table(report: Report) -> str:
    """The kills, one a line, and why requests were not answered in full."""
    rows = [
        ["-" if fault[name] is None else str(fault[name]) for name in COLUMNS]
        for fault in report.figures["faults"]
    ]
    lines = aligned([COLUMNS, *rows])
    parts = [{"fault": "before", **report.figures["before"]}, *report.figures["faults"]]
    lines += [
        f"{part['fault']}: {count} x {reason}"
        for part in parts
        for reason, count in part["reasons"].items()
    ]
    return "\n".join(lines)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
