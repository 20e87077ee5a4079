"""``dps-ray check chaos``: a small real fleet, its parts killed in turn under load."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from dps_ray.chaos.faults import Fault
from dps_ray.chaos.fleet import HUNG_AFTER_S, MODEL, START_TIMEOUT_S, chaos_config
from dps_ray.chaos.load import LoadOptions
from dps_ray.chaos.run import Target, run_chaos
from dps_ray.chaos.verdict import table
from dps_ray.demo.fleet import running_fleet
from dps_ray.demo.processes import descendants
from dps_ray.models.tiny import make_tiny
from dps_ray.report import Report


def check_chaos(
    root: Path,
    faults: Sequence[Fault],
    *,
    duration_s: float,
    replicas: int,
    ranks: int,
    load: LoadOptions,
    say: Callable[[str], None],
) -> Report:
    """Start a fleet, hurt it, judge it, stop it.

    Parameters
    ----------
    root
        Folder of the tiny model.
    faults
        What to kill, in this order.
    duration_s
        Least duration of the load, seconds.
    replicas, ranks
        Size of the fleet, and of each replica.
    load
        What the clients send.
    say
        Gets lines for people.

    Raises
    ------
    FleetError
        The fleet does not start, or something of it could not be stopped.
    """
    model = make_tiny("qwen3", root)
    others = descendants()
    with running_fleet(chaos_config(replicas, ranks), str(model)) as fleet:
        fleet.wait_until_ready(START_TIMEOUT_S, lambda text: say(f"... {text}"))
        target = Target(
            fleet.url,
            MODEL,
            replicas,
            lambda: descendants() - others,
            hung_after_s=HUNG_AFTER_S,
        )
        report = asyncio.run(
            run_chaos(target, faults, duration_s=duration_s, load=load, seed=load.seed, say=say)
        )
    say(table(report))
    return report
