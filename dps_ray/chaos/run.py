"""One run: clients on, kill after kill, and between two kills a fleet at full strength."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dps_ray.chaos.faults import Fault, find, kill_one, title_of
from dps_ray.chaos.load import Load, LoadOptions
from dps_ray.chaos.verdict import OUT_OF_ROUTING_S, Aftermath, judge, share_out
from dps_ray.chaos.watch import Sight, Watch
from dps_ray.fleet.reporting import ReportOptions
from dps_ray.report import Report

POLL_S = 0.05
SETTLE_S = 8.0
HEAL_TIMEOUT_S = 180.0
LEFT_BEHIND_S = 15.0
"""Time in which what has lost its parent must end."""


@dataclass(frozen=True)
class Target:
    """A running fleet."""

    url: str
    model: str
    replicas: int
    processes: Callable[[], Collection[int]]
    """All processes of the fleet."""
    lease_limit: int = 1
    hung_after_s: float = ReportOptions().hung_after_s
    """When the fleet gives up an engine that hangs, seconds."""
    out_of_routing_s: float = OUT_OF_ROUTING_S
    """Longest time until nobody would send a dead replica anything, seconds."""


async def run_chaos(
    target: Target,
    faults: Sequence[Fault],
    *,
    duration_s: float,
    load: LoadOptions,
    seed: int,
    settle_s: float = SETTLE_S,
    say: Callable[[str], None],
) -> Report:
    """Hurt a fleet under load.

    Parameters
    ----------
    target
        The fleet, at full strength.
    faults
        What to kill, in this order.
    duration_s
        Least duration of the load, seconds; it lasts longer if the last wound takes longer.
    load
        What the clients send.
    seed
        Of the choice among equal processes.
    settle_s
        Least time between a fleet at full strength and the next kill, seconds.
    say
        Gets a line for every event.
    """
    rng = random.Random(seed)
    report = Report("check chaos")
    clients = Load(target.url, target.model, load)
    watch = Watch(target.url, target.processes)
    aftermaths: list[Aftermath] = []
    whole = _parts(target)
    async with watch.running():
        async with clients.running():
            # A router comes with the first request.
            await _strength(watch, target, HEAL_TIMEOUT_S)
            began_s = time.monotonic()
            for fault in faults:
                await asyncio.sleep(settle_s)
                await clients.amid_wave()
                aftermaths.append(await _hurt(target, fault, watch, whole, rng))
                say(_line(aftermaths[-1]))
            await asyncio.sleep(max(0.0, began_s + duration_s - time.monotonic()))
        left_behind = await _left_behind(target, whole)
    before = share_out(clients.records, aftermaths)
    judge(
        report,
        aftermaths,
        before,
        watch.restores,
        left_behind=left_behind,
        lease_limit=target.lease_limit,
        hung_after_s=target.hung_after_s,
        out_of_routing_s=target.out_of_routing_s,
    )
    return report


async def _hurt(
    target: Target, fault: Fault, watch: Watch, whole: Counter[Fault], rng: random.Random
) -> Aftermath:
    # Without a look at the fleet before, a replica that has left routing could not be told.
    routable = (await _sight(watch)).routable
    kill = kill_one(fault, target.processes, rng)
    after = Aftermath(kill)
    deadline_s = kill.at_s + HEAL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        sight = watch.sight
        if sight is not None and sight.at_s > kill.at_s:
            if fault.hits_replica and after.out_of_routing_s is None and routable - sight.routable:
                after.gone = routable - sight.routable
                gone_at_s = min(sight.gone_at_s.get(name, sight.at_s) for name in after.gone)
                # It may be heard before the call that kills returns.
                after.out_of_routing_s = max(0.0, gone_at_s - kill.at_s)
            after.returned |= bool(after.gone & sight.routable)
            hurt = fault.hits_replica and after.out_of_routing_s is None
            if not hurt and _is_whole(watch, target) and _replaced(target, kill.process, whole):
                after.full_strength_s = time.monotonic() - kill.at_s
                break
        await asyncio.sleep(POLL_S)
    return after


async def _sight(watch: Watch) -> Sight:
    """What the controller says; a call may just have failed or taken too long."""
    deadline_s = time.monotonic() + HEAL_TIMEOUT_S
    while (sight := watch.sight) is None:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the controller has not answered for {HEAL_TIMEOUT_S:g} s")
        await asyncio.sleep(POLL_S)
    return sight


def _is_whole(watch: Watch, target: Target) -> bool:
    sight = watch.sight
    return sight is not None and len(sight.serving) == target.replicas and sight.listening > 0


def _replaced(target: Target, killed: int, whole: Counter[Fault]) -> bool:
    processes = set(target.processes())
    return killed not in processes and not whole - _parts(target, processes)


def _parts(target: Target, processes: Collection[int] | None = None) -> Counter[Fault]:
    """How many processes of each kind there are."""
    among = target.processes() if processes is None else processes
    return Counter({fault: len(find(fault, among)) for fault in Fault})


async def _strength(watch: Watch, target: Target, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not _is_whole(watch, target):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the fleet is not at full strength: {watch.sight}")
        await asyncio.sleep(POLL_S)


async def _left_behind(target: Target, whole: Counter[Fault]) -> list[str]:
    deadline_s = time.monotonic() + LEFT_BEHIND_S
    while (extra := _parts(target) - whole) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
    among = target.processes()
    left = {process for fault in extra for process in find(fault, among)}
    return [title_of(process) for process in sorted(left)]


def _line(after: Aftermath) -> str:
    out_s, full_s = after.out_of_routing_s, after.full_strength_s
    words = [f"hit {after.kill.fault.value} (process {after.kill.process}):"]
    if out_s is not None:
        words.append(f"out of routing after {out_s:.2f} s,")
    words.append(f"full strength after {full_s:.1f} s" if full_s else "never at full strength")
    return " ".join(words)
