"""``dps-ray bench memory``: cost of lending, restoring and moving memory."""

import argparse

from dps_ray.cli.arguments import result_folder, whole
from dps_ray.cli.output import add_json_flag, finish, say


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``bench memory``."""
    command.add_argument(
        "--units", type=whole(), default=16, help="units of the residual (default: 16)"
    )
    command.add_argument(
        "--unit-mib", type=whole(), default=8, help="size of a unit, MiB (default: 8)"
    )
    command.add_argument(
        "--rounds", type=whole(), default=15, help="turns of each comparison (default: 15)"
    )
    command.add_argument(
        "--no-engine",
        action="store_true",
        help="leave out what needs a real engine: a long request, the return after a burst",
    )
    command.add_argument(
        "--root", type=result_folder, default=None, help="folder of the models (default: the cache)"
    )
    add_json_flag(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; exit status 0 only when every target is met."""
    # vLLM takes seconds to import, and the other benchmarks do without it.
    from dps_ray.bench.memory import bench_compaction, bench_memory
    from dps_ray.bench.memory_return import ReturnBench, bench_return
    from dps_ray.models.cache import cache_root

    def tell(text: str) -> None:
        say(args, text)

    report = bench_memory(units=args.units, unit_mib=args.unit_mib, rounds=args.rounds, say=tell)
    if not args.no_engine:
        root = args.root or cache_root()
        bench_compaction(report, root, tell)
        bench_return(report, root, ReturnBench(rounds=args.rounds), tell)
    return finish(args, report)
