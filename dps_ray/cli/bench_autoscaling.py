"""``dps-ray bench autoscaling``: what a configured policy would do to a recorded burst."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dps_deployments
from dps_autoscaling.checks import autoscaling_faults, scaling_options
from dps_autoscaling.policy import ElasticScalingPolicy
from dps_autoscaling.scaler import ScalingOptions
from dps_autoscaling.simulation import ReplicaModel, Tick, simulate
from dps_autoscaling.steps import Step, hasty, steps_of, turns, unbounded
from dps_deployments.config_file import read_config_file
from ray.serve.config import AutoscalingConfig

from dps_ray.bench.autoscaling_plot import draw_autoscaling
from dps_ray.bench.trace_files import BUNDLED, read_trace
from dps_ray.bench.traces import TraceRequest, repeat, resize, speed_up
from dps_ray.cli.arguments import number, picture_file, present_file, whole
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.config import DpsConfigError
from dps_ray.report import Report

CONFIGS = Path(dps_deployments.__file__).parents[1] / "configs"
DEFAULT_CONFIG = CONFIGS / "autoscaling" / "qwen3-8b.yaml"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``bench autoscaling``."""
    command.add_argument(
        "--config", type=present_file, default=DEFAULT_CONFIG, help="serve config file"
    )
    command.add_argument("--trace", default=next(iter(BUNDLED)), help="as for bench replay")
    command.add_argument(
        "--stretch", type=number(above=0.0), default=10.0, help="10: arrive so much slower"
    )
    command.add_argument("--copies", type=whole(), default=8, help="requests for each recorded one")
    command.add_argument(
        "--output-scale", type=number(above=0.0), default=20.0, help="on output lengths"
    )
    command.add_argument(
        "--tail-s", type=number(least=0.0), default=3000.0, help="simulated after the trace"
    )
    command.add_argument("--out", type=picture_file, help="PNG file for the picture")
    add_json_flag(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, judge and draw; exit status 0 only when the fleet did not flap."""
    config, options = _autoscaling(args.config)
    trace = _trace(args)
    ticks = simulate(
        trace,
        ElasticScalingPolicy(**config.policy.policy_kwargs),
        config,
        ReplicaModel(),
        tail_s=args.tail_s,
    )
    steps = steps_of([(tick.time_s, tick.target) for tick in ticks])
    report = Report("bench autoscaling", _figures(ticks, steps, len(trace)))
    report.check("the fleet grew", any(step.replicas > 0 for step in steps))
    report.check("the fleet shrank again", ticks[-1].target == config.min_replicas)
    report.check("no step down within calm_s of another step", not hasty(steps, options.calm_s))
    report.check("every step was bounded", not unbounded(steps, options))
    if args.out is not None:
        draw_autoscaling(
            args.out,
            ticks,
            ReplicaModel().base_blocks,
            "simulation of a recorded burst around the real policy",
        )
    say(args, _text(report.figures))
    return finish(args, report)


def _autoscaling(path: Path) -> tuple[AutoscalingConfig, ScalingOptions]:
    """The first ``autoscaling_config`` of a model in a serve config file."""
    document = read_config_file(path).document
    try:
        deployments = [
            app["args"]["llm_config"]["deployment_config"]
            for app in document["applications"]
            if "llm_config" in app.get("args", {})
        ]
        raw = deployments[0]["autoscaling_config"]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise DpsConfigError(
            f"--config is {str(path)!r}, in which no application has "
            "args.llm_config.deployment_config.autoscaling_config: add it, or give a file such as "
            f"{DEFAULT_CONFIG}"
        ) from None
    faults = autoscaling_faults(raw, "autoscaling_config")
    if faults:
        raise DpsConfigError(*faults)
    options = scaling_options(raw)
    if options is None:
        raise DpsConfigError(
            f"autoscaling_config.policy is {raw.get('policy')!r} in {path}: the simulation needs "
            "policy_function dps_autoscaling.policy:ElasticScalingPolicy"
        )
    return AutoscalingConfig(**raw), options


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    """The trace, slower in time, each request repeated over the following ``stretch`` seconds."""
    recorded = resize(
        speed_up(read_trace(args.trace), 1.0 / args.stretch), output_scale=args.output_scale
    )
    return repeat(recorded, args.copies, args.stretch)


def _figures(ticks: list[Tick], steps: list[Step], requests: int) -> dict[str, Any]:
    replica_s = sum(tick.running for tick in ticks)
    return {
        "simulated": True,
        "requests": requests,
        "seconds": len(ticks),
        "steps": [asdict(step) for step in steps],
        "most_replicas": max(tick.running for tick in ticks),
        "turns": turns(steps),
        "replica_seconds": replica_s,
        "fast_share": sum(tick.fast for tick in ticks) / max(1, replica_s),
        "longest_queue": max(tick.queued for tick in ticks),
    }


def _text(figures: dict[str, Any]) -> str:
    steps = ", ".join(f"{step['time_s']:.0f} s {step['replicas']:+d}" for step in figures["steps"])
    return (
        f"simulated: {figures['requests']} requests in {figures['seconds']} s\n"
        f"steps: {steps}\n"
        f"most replicas {figures['most_replicas']}, turns {figures['turns']}, "
        f"{figures['fast_share']:.1%} of replica time in fast mode, "
        f"longest queue {figures['longest_queue']}"
    )
