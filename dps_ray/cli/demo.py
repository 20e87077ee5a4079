"""``dps-ray demo``: serve a small fleet, replay a bursty trace, draw what happened."""

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import dps_deployments

from dps_ray.bench.slo import SloTarget
from dps_ray.cli.arguments import number, present_file, result_folder
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.demo.fleet import Fleet, FleetError, running_fleet
from dps_ray.demo.live import LiveView
from dps_ray.demo.load import DemoLoad
from dps_ray.demo.outcome import PICTURE, SUMMARY, describe, summarise_session, write_outcome
from dps_ray.demo.processes import descendants
from dps_ray.demo.serve_config import FleetConfig, read_config
from dps_ray.demo.session import DemoError, Session, run_session
from dps_ray.models.cache import cache_root
from dps_ray.models.smollm2 import FOLDER, prepare_smollm2
from dps_ray.report import Report

DEFAULT_CONFIG = Path(dps_deployments.__file__).parents[1] / "configs" / "local.yaml"
START_TIMEOUT_S = 300.0
SETTLE_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    load = DemoLoad()
    parser.add_argument(
        "--config", type=present_file, default=DEFAULT_CONFIG, help="Serve configuration"
    )
    parser.add_argument(
        "--out", type=result_folder, default=Path("demo-out"), help="folder for the results"
    )
    parser.add_argument(
        "--speed", type=number(above=0.0), default=load.speed, help="2: arrive twice as fast"
    )
    parser.add_argument(
        "--slo-ttft-ms",
        type=number(above=0.0),
        default=SloTarget().ttft_ms,
        help="the paper's 2000 ms",
    )
    parser.add_argument(
        "--start-timeout-s",
        type=number(above=0.0),
        default=START_TIMEOUT_S,
        help="for the fleet's start",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep serving after the replay until Ctrl-C"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # SIGTERM must end the demo by its normal way out too, which stops the fleet.
    signal.signal(signal.SIGTERM, _interrupt)
    report = Report("demo")
    own = descendants()
    config = read_config(args.config)
    trace = DemoLoad(speed=args.speed).requests(config.max_model_len)
    try:
        with running_fleet(config, _model_source(args, config)) as fleet:
            started_s = time.monotonic()
            fleet.wait_until_ready(args.start_timeout_s, lambda text: say(args, f"... {text}"))
            start_s = time.monotonic() - started_s
            report.figures["start_s"] = round(start_s, 1)
            say(
                args,
                f"ready at {fleet.url} after {start_s:.0f} s: {len(trace)} requests in "
                f"{trace[-1].arrival_s:.0f} s",
            )
            view = LiveView(sys.stderr if args.json else sys.stdout, config.replicas)
            session = asyncio.run(
                run_session(
                    fleet.url,
                    config.model_id,
                    trace,
                    config.replicas,
                    settle_s=SETTLE_S,
                    show=view.show,
                )
            )
            _conclude(args, report, config, session)
            if args.keep:
                _serve_on(args, fleet)
    except (FleetError, DemoError) as error:
        print(f"dps-ray demo: {error}", file=sys.stderr)
        report.check("the fleet started, served and stopped", False)
    except KeyboardInterrupt:
        print("dps-ray demo: interrupted; the fleet was stopped", file=sys.stderr)
        report.check("the demo ran to its end", False)
    report.check("no process left behind", not descendants() - own)
    return finish(args, report)


def _model_source(args: argparse.Namespace, config: FleetConfig) -> str:
    """Prepare the demo's own model; any other folder or Hub id is taken as it is."""
    if Path(config.model_source).name != FOLDER or Path(config.model_source).is_dir():
        return config.model_source
    say(args, "... converting SmolLM2-135M-Instruct, once")
    return str(prepare_smollm2(cache_root()))


def _conclude(
    args: argparse.Namespace, report: Report, config: FleetConfig, session: Session
) -> None:
    target = SloTarget(ttft_ms=args.slo_ttft_ms, t_base_ms=session.t_base_ms)
    summary = summarise_session(session, target) | {"dps_options": config.dps_options}
    title = f"{config.replicas} replicas of {config.model_id}, Azure 2023 code trace"
    figures, picture = write_outcome(args.out, summary, session, target, title)
    report.figures.update(summary)
    report.figures.update({"summary": str(figures), "picture": str(picture)})
    requests, elastic = summary["requests"], summary["elastic"]
    report.check("no failed request", requests["ok"] == requests["sent"])
    report.check("at least one switch to fast mode", elastic["switches_to_fast"] >= 1)
    report.check("at least one return to full mode", elastic["switches_to_full"] >= 1)
    report.check(f"{SUMMARY} written", figures.stat().st_size > 0)
    report.check(f"{PICTURE} written", picture.stat().st_size > 0)
    say(args, f"\n{describe(summary)}\nwritten    {figures} and {picture}")


def _serve_on(args: argparse.Namespace, fleet: Fleet) -> None:
    say(args, f"serving at {fleet.url}/v1 until Ctrl-C; fleet state at {fleet.url}/dps/status")
    try:
        signal.pause()
    except KeyboardInterrupt:
        say(args, "stopping")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
