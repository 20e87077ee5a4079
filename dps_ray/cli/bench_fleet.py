"""``dps-ray bench fleet``: what routing and the controller cost, without Ray and through it."""

import argparse

from dps_ray.cli.arguments import whole
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.fleet.policies import POLICIES
from dps_ray.fleet_cost.controller import FleetLoad, measure_controller, measure_decisions
from dps_ray.report import Report

P99_LIMIT_US = 200.0
HEARD_SHARE = 0.95
"""Of one report a second: a reply that takes its time delays the next."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``bench fleet``."""
    command.add_argument("--replicas", type=whole(), default=1000, help="simulated replicas")
    command.add_argument("--decisions", type=whole(), default=20000, help="decisions per policy")
    command.add_argument("--seconds", type=whole(), default=10, help="simulated controller seconds")
    command.add_argument(
        "--serve", action="store_true", help="also measure the controller as a Serve deployment"
    )
    command.add_argument("--policy", choices=tuple(POLICIES), action="append", help="default: all")
    add_json_flag(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and judge: decisions within 200 us at p99, the controller under one core."""
    load = FleetLoad(replicas=args.replicas, seconds=args.seconds)
    controller = measure_controller(load)
    say(
        args,
        f"controller: {controller['reports_per_s']:.0f} reports/s and "
        f"{controller['publications_per_s']:.0f} publications/s take "
        f"{controller['core_share']:.2f} of a core",
    )
    decisions = {}
    for name in args.policy or POLICIES:
        figures = decisions[name] = measure_decisions(POLICIES[name](), load, args.decisions)
        say(
            args,
            f"{name:<15} p50 {figures['p50_us']:6.1f} us   p99 {figures['p99_us']:6.1f} us   "
            f"publication {figures['merge_p50_us'] / 1e3:.1f} ms",
        )
    report = Report(
        "bench fleet",
        {"replicas": args.replicas, "controller": controller, "decisions": decisions},
    )
    if args.serve:
        _measure_serve(args, report)
    report.check("controller under one core", controller["core_share"] < 1.0)
    for name, figures in decisions.items():
        report.check(f"{name} decides within 200 us at p99", figures["p99_us"] < P99_LIMIT_US)
    return finish(args, report)


def _measure_serve(args: argparse.Namespace, report: Report) -> None:
    # Ray takes seconds to import, which the other figures can do without.
    from dps_ray.fleet_cost.deployed import ServeLoad, measure_serve

    measured = measure_serve(ServeLoad(replicas=args.replicas, seconds=2 * args.seconds))
    report.figures["serve"] = measured
    for way, name in (("direct", "at its own port"), ("handle", "over Serve's handle")):
        figures = measured[way]
        say(
            args,
            f"{name}: {figures['reports_per_s']:.0f} reports/s and "
            f"{figures['publications_per_s']:.0f} publications/s take {figures['core_share']:.2f} "
            f"of a core; those who play the fleet take {figures['players_core_share']:.2f} of "
            f"{figures['cores']}; {figures['refused']} calls were not answered in time",
        )
        if figures["reports_per_s"] and figures["publications_per_s"]:
            say(
                args,
                f"  a report costs {figures['us_per_report']:.0f} us, its reply takes "
                f"{figures['round_trip_p50_ms']:.1f} ms p50, {figures['round_trip_p99_ms']:.1f} ms "
                f"p99; a state is {figures['router_age_p50_ms']:.0f} ms p50, "
                f"{figures['router_age_p99_ms']:.0f} ms p99 old when a router has it",
            )
    direct = measured["direct"]
    report.check(
        f"as deployed {args.replicas} replicas were heard once a second",
        direct["reports_per_s"] >= HEARD_SHARE * args.replicas and not direct["refused"],
    )
    report.check("as deployed no call took the handle", not direct["by_handle"])
    report.check("controller under one core as deployed", direct["core_share"] < 1.0)
