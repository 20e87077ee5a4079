"""``dps-ray bench``: replays of traces with SLO metrics; the other benchmarks' modules."""

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from dps_ray.bench.client import ClientOptions, CompletionClient, open_http, served_model
from dps_ray.bench.prompts import prompt_maker
from dps_ray.bench.records import RequestRecord
from dps_ray.bench.replay import replay
from dps_ray.bench.report import summarise, table
from dps_ray.bench.slo import SloTarget
from dps_ray.bench.trace_files import BUNDLED, read_trace
from dps_ray.bench.traces import TraceRequest, resize, speed_up, window
from dps_ray.cli import (
    bench_autoscaling,
    bench_engines,
    bench_fleet,
    bench_kernels,
    bench_layers,
    bench_memory,
)
from dps_ray.cli.arguments import http_url, number, result_folder, whole
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.cli.parser import add_commands
from dps_ray.modes import Floor
from dps_ray.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_commands(parser, "benchmark")
    command = actions.add_parser(
        "replay", help="how a server does under a recorded burst: TTFT, TPOT and objectives met"
    )
    command.add_argument(
        "trace", help=f"CSV file (Azure, BurstGPT or vidur columns) or {', '.join(BUNDLED)}"
    )
    command.add_argument(
        "--url", type=http_url, required=True, help="root of the server, http://host:port"
    )
    command.add_argument("--model", help="model name (default: the only one the server offers)")
    _add_trace_arguments(command)
    _add_request_arguments(command)
    command.add_argument(
        "--out", type=result_folder, help="folder for summary.json and requests.jsonl"
    )
    add_json_flag(command)
    command.set_defaults(run=run)
    bench_kernels.add_arguments(
        actions.add_parser(
            "kernels", help="how fast both modes' GEMMs and experts are beside the stock kernels"
        )
    )
    bench_fleet.add_arguments(
        actions.add_parser(
            "fleet", help="what a routing decision and the controller cost with 1,000 replicas"
        )
    )
    bench_autoscaling.add_arguments(
        actions.add_parser(
            "autoscaling", help="when replicas would be added and stopped in a burst (a simulation)"
        )
    )
    bench_memory.add_arguments(
        actions.add_parser(
            "memory", help="what lending memory, restoring it and moving KV blocks costs"
        )
    )
    bench_engines.add_engine_arguments(
        actions.add_parser("engine", help="tokens per second of both modes beside plain vLLM's")
    )
    bench_engines.add_pressure_arguments(
        actions.add_parser(
            "pressure", help="requests served in a burst beside plain vLLM on the same memory"
        )
    )
    bench_layers.add_arguments(
        actions.add_parser("layers", help="accuracy while full precision returns layer by layer")
    )


def _add_trace_arguments(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("trace")
    group.add_argument(
        "--start-s", type=number(least=0.0), default=0.0, help="start of the window, seconds"
    )
    group.add_argument(
        "--end-s", type=number(above=0.0), default=float("inf"), help="its end, seconds"
    )
    group.add_argument("--max-requests", type=whole(), help="stop after so many requests")
    group.add_argument(
        "--speed", type=number(above=0.0), default=1.0, help="2: arrive twice as fast"
    )
    group.add_argument(
        "--prompt-scale", type=number(above=0.0), default=1.0, help="factor on prompt lengths"
    )
    group.add_argument(
        "--output-scale", type=number(above=0.0), default=1.0, help="factor on output lengths"
    )
    group.add_argument("--max-prompt-tokens", type=whole(), help="clip prompts to so many tokens")
    group.add_argument("--max-output-tokens", type=whole(), help="clip outputs to so many tokens")


def _add_request_arguments(command: argparse.ArgumentParser) -> None:
    slo = SloTarget()
    group = command.add_argument_group("requests and objectives")
    group.add_argument(
        "--prompt",
        choices=("ids", "words"),
        default="ids",
        help="ids: exact lengths, for servers that take token ids (vLLM, SGLang); words: text",
    )
    group.add_argument("--seed", type=whole(0), default=0, help="seed of the prompts")
    group.add_argument(
        "--respect-eos", action="store_true", help="let the model stop early (any server)"
    )
    group.add_argument(
        "--precision", choices=tuple(Floor), help="header X-DPS-Precision of every request"
    )
    group.add_argument(
        "--timeout-s", type=number(above=0.0), default=600.0, help="per request, seconds"
    )
    group.add_argument("--slo-ttft-ms", type=number(above=0.0), default=slo.ttft_ms)
    group.add_argument("--slo-t-base-ms", type=number(above=0.0), default=slo.t_base_ms)
    group.add_argument("--slo-tbt-factor", type=number(above=0.0), default=slo.tbt_factor)


def select(args: argparse.Namespace) -> list[TraceRequest]:
    """Read the trace and fit it as the options say."""
    requests = window(read_trace(args.trace), args.start_s, args.end_s)
    if args.max_requests is not None:
        requests = requests[: args.max_requests]
    return resize(
        speed_up(requests, args.speed),
        prompt_scale=args.prompt_scale,
        output_scale=args.output_scale,
        max_prompt_tokens=args.max_prompt_tokens,
        max_output_tokens=args.max_output_tokens,
    )


def run(args: argparse.Namespace) -> int:
    trace = select(args)
    target = SloTarget(args.slo_ttft_ms, args.slo_t_base_ms, args.slo_tbt_factor)
    records = asyncio.run(_replay(args, trace))
    summary = summarise(records, target)
    report = Report("bench replay", summary)
    report.check("every request was answered", summary["requests"]["ok"] == len(trace))
    if args.out is not None:
        _write(args.out, summary, records)
    say(args, table(summary))
    return finish(args, report)


async def _replay(args: argparse.Namespace, trace: list[TraceRequest]) -> list[RequestRecord]:
    async with open_http(args.url) as http:
        options = ClientOptions(
            model=args.model or await served_model(http),
            request_timeout_s=args.timeout_s,
            ignore_eos=not args.respect_eos,
            headers=(("X-DPS-Precision", args.precision),) if args.precision else (),
        )
        client = CompletionClient(http, options)
        say(args, f"replaying {len(trace)} requests over {trace[-1].arrival_s:.1f} s")
        return await replay(trace, client, prompt_maker(args.prompt, args.seed))


def _write(folder: Path, summary: dict, records: list[RequestRecord]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))
    lines = (json.dumps(asdict(record)) for record in records)
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")
