"""``dps-ray``: the operator's command."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

from dps_ray.cli.parser import Parser, UsageError, add_commands
from dps_ray.config import DpsConfigError

COMMANDS = {
    "models": "make or convert the models used by the demo and the tests",
    "check": "prove that elastic memory and nested precision change nothing they must not change",
    "tune": "find the switching thresholds that cost a replica least",
    "bench": "measure a server under load, engines, kernels, memory, routing or scaling",
    "validate": "find everything wrong with Serve config files before they are deployed",
    "explain": "tell why a request goes, or went, to a replica and not to another",
    "admin": "give orders to a fleet: mode pins, and the end of a restore; or pin a single engine",
    "demo": "serve a small fleet, replay a bursty trace against it and draw what happened",
}
WITH_FLEETS = ("check", "demo")
LEVEL = "VLLM_LOGGING_LEVEL"


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Assemble the command tree; only the chosen command's module, often a slow one, is loaded."""
    parser = Parser(prog="dps-ray", description="Elastic LLM serving on Ray.")
    subparsers = add_commands(parser, "command")
    for name, summary in COMMANDS.items():
        sub = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            importlib.import_module(f"dps_ray.cli.{name}").add_arguments(sub)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; a configuration error is one line on standard error and exit status 2."""
    words = sys.argv[1:] if argv is None else argv
    chosen = words[0] if words else None
    with contextlib.ExitStack() as log_off:
        log_off.enter_context(_vllm_log_off())
        try:
            args, left = build_parser(chosen).parse_known_args(words)
            if left:
                raise UsageError(
                    f"{args.prog}: unrecognized arguments: {' '.join(left)}; see {args.prog} --help"
                )
        except UsageError as error:
            print(error, file=sys.stderr)
            return 2
        if chosen in WITH_FLEETS:
            log_off.close()
        try:
            return int(args.run(args))
        except DpsConfigError as error:
            print(f"{args.prog}: {error}", file=sys.stderr)
            return 2


@contextlib.contextmanager
def _vllm_log_off() -> Iterator[None]:
    """vLLM logs to standard output from its import on, which is the report's alone.

    Fleets take the environment over and keep all of their log, so where some may start it is as it
    was once the command's modules, and vLLM with them, are loaded.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if LEVEL in os.environ:
        yield
        return
    os.environ[LEVEL] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop(LEVEL, None)


if __name__ == "__main__":
    sys.exit(main())
