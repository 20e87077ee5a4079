"""``dps-ray check``: proofs on real engines, seconds to minutes on tiny models."""

import argparse
import signal

from dps_ray.burst.load import BurstLoad
from dps_ray.chaos.check import check_chaos
from dps_ray.chaos.faults import Fault
from dps_ray.chaos.load import LoadOptions
from dps_ray.checks.engine_check import check_engine
from dps_ray.checks.memory_check import LEAST_OPERATIONS, check_memory
from dps_ray.cli.arguments import number, picture_file, result_folder, whole
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.cli.parser import add_commands
from dps_ray.config import DpsConfigError
from dps_ray.floors.check import check_fleet_floors
from dps_ray.floors.clients import FloorLoad
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import TINY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``check`` subcommands."""
    what = add_commands(parser, "check")
    engine = what.add_parser(
        "engine", help="elastic memory and nested precision against static engines, bit for bit"
    )
    engine.add_argument(
        "--model",
        action="append",
        choices=tuple(TINY),
        help="tiny model to check; may be repeated (default: all)",
    )
    engine.add_argument(
        "--cycles", type=whole(), default=200, help="forced switch cycles (default: 200)"
    )
    engine.add_argument(
        "--load-cycles",
        type=whole(),
        default=1000,
        help="cycles by real pressure, compared with a shadow engine (default: 1000)",
    )
    engine.add_argument(
        "--floor-requests",
        type=whole(),
        default=2000,
        help="requests of which a tenth insists on full precision (default: 2000)",
    )
    engine.add_argument(
        "--root", type=result_folder, default=None, help="folder of the models (default: the cache)"
    )
    add_json_flag(engine)
    engine.set_defaults(run=run_engine)
    memory = what.add_parser(
        "memory", help="random orders on real memory, and again with each safety rule removed"
    )
    memory.add_argument(
        "--operations",
        type=whole(LEAST_OPERATIONS),
        default=1_000_000,
        help="of the soak (default: 1000000)",
    )
    memory.add_argument(
        "--histories",
        type=whole(0),
        default=100,
        help="short histories that Hypothesis searches; 0 without Hypothesis (default: 100)",
    )
    memory.add_argument(
        "--seed", type=whole(0), default=0, help="of everything random (default: 0)"
    )
    add_json_flag(memory)
    memory.set_defaults(run=run_memory)
    floors = what.add_parser(
        "floors",
        help="a real fleet under load: answers that insist on full precision against a static "
        "16-bit engine's",
    )
    floors.add_argument(
        "--requests",
        type=whole(),
        default=FloorLoad().requests,
        help=f"of which a tenth insists on full precision (default: {FloorLoad().requests})",
    )
    floors.add_argument("--replicas", type=whole(), default=2, help="default: 2")
    add_json_flag(floors)
    floors.set_defaults(run=run_floors)
    chaos = what.add_parser(
        "chaos", help="a real fleet under load, whose parts are killed one after the other"
    )
    chaos.add_argument(
        "--duration-s",
        type=number(above=0.0),
        default=180.0,
        help="least duration of the load, seconds; kills and their healing may take longer "
        "(default: 180)",
    )
    chaos.add_argument(
        "--fault",
        action="append",
        choices=tuple(Fault),
        help="part to kill; may be repeated, in order (default: each once)",
    )
    chaos.add_argument("--replicas", type=whole(), default=2, help="default: 2")
    chaos.add_argument(
        "--ranks", type=whole(), default=2, help="tensor-parallel ranks (default: 2)"
    )
    chaos.add_argument(
        "--clients",
        type=whole(),
        default=LoadOptions().clients,
        help=f"requests open at once in a wave (default: {LoadOptions().clients})",
    )
    chaos.add_argument("--seed", type=whole(0), default=0, help="of everything random (default: 0)")
    add_json_flag(chaos)
    chaos.set_defaults(run=run_chaos)
    scaling = what.add_parser(
        "autoscaling", help="a real fleet that grows in a recorded burst and shrinks after it"
    )
    load = BurstLoad()
    scaling.add_argument(
        "--stretch",
        type=whole(),
        default=load.stretch,
        help=f"the burst arrives so much slower than recorded (default: {load.stretch})",
    )
    scaling.add_argument(
        "--open-requests",
        type=whole(),
        default=load.open_requests,
        help=f"requests open at once in the burst, on average (default: {load.open_requests})",
    )
    scaling.add_argument("--out", type=picture_file, help="PNG file for the picture")
    add_json_flag(scaling)
    scaling.set_defaults(run=run_autoscaling)


def run_engine(args: argparse.Namespace) -> int:
    """Run the engine checks; exit status 0 only when all hold."""
    report = check_engine(
        args.model or tuple(TINY),
        args.root or cache_root(),
        cycles=args.cycles,
        load_cycles=args.load_cycles,
        floor_requests=args.floor_requests,
        say=lambda text: say(args, text),
    )
    return finish(args, report)


def run_memory(args: argparse.Namespace) -> int:
    """Run the memory check; exit status 0 only when the soak holds and every mutant is killed."""
    report = check_memory(
        operations=args.operations,
        histories=args.histories,
        seed=args.seed,
        say=lambda text: say(args, text),
    )
    return finish(args, report)


def run_floors(args: argparse.Namespace) -> int:
    """Ask a fleet; exit status 0 only when everybody got the precision they insisted on."""
    # It must end by the normal way out too, which stops the fleet.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = check_fleet_floors(
        cache_root(),
        FloorLoad(requests=args.requests),
        replicas=args.replicas,
        say=lambda text: say(args, text),
    )
    return finish(args, report)


def run_chaos(args: argparse.Namespace) -> int:
    """Hurt a fleet; exit status 0 only when its clients lost nothing they must not lose."""
    # It must end by the normal way out too, which stops the fleet.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faults = [Fault(name) for name in args.fault or ()] or [
        f for f in Fault if not f.hits_rank or args.ranks > 1
    ]
    for fault in faults:
        if fault.hits_rank and args.ranks < 2:
            raise DpsConfigError(
                f"--fault {fault.value} needs --ranks 2 or more: one rank has no process"
            )
    report = check_chaos(
        cache_root(),
        faults,
        duration_s=args.duration_s,
        replicas=args.replicas,
        ranks=args.ranks,
        load=LoadOptions(clients=args.clients, seed=args.seed),
        say=lambda text: say(args, text),
    )
    return finish(args, report)


def run_autoscaling(args: argparse.Namespace) -> int:
    """Let a fleet scale; exit status 0 only when it followed the burst without flapping."""
    # Ray takes seconds to import, which the checks of single engines can do without.
    from dps_ray.burst.check import check_autoscaling

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = check_autoscaling(
        cache_root(),
        BurstLoad(stretch=args.stretch, open_requests=args.open_requests),
        picture=args.out,
        say=lambda text: say(args, text),
    )
    return finish(args, report)
