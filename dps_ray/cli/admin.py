"""``dps-ray admin``: orders to the controller of a running fleet, over HTTP, or to one engine."""

import argparse
import os
from typing import Any
from urllib.parse import quote

import httpx

from dps_ray.cli.arguments import http_url, number, present_file
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.cli.parser import add_commands
from dps_ray.config import DpsConfigError
from dps_ray.engine.status_page import StatusPage
from dps_ray.fleet.orders import FLEET
from dps_ray.fleet.publication import DEFAULT_ADMIN_PORT
from dps_ray.modes import Pin
from dps_ray.report import Report

TOKEN_VARIABLE = "DPS_ADMIN_TOKEN"
TIMEOUT_S = 10.0
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_ADMIN_PORT}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``admin`` subcommands."""
    what = add_commands(parser, "order")
    pin = what.add_parser("pin", help="hold a replica, or all, in a mode; lasts until 'unpin'")
    pin.add_argument("mode", choices=tuple(Pin), help="full, fast, or auto: let the policy decide")
    _add_target(pin).add_argument(
        "--key",
        help="an engine of this host without a fleet, by the key in its log; never one of a fleet, "
        "which would go on as if the engine had the fleet's own pin",
    )
    pin.set_defaults(run=run_pin)
    unpin = what.add_parser("unpin", help="take a pin back: the configuration counts again")
    _add_target(unpin)
    unpin.set_defaults(run=run_unpin)
    revoke = what.add_parser("revoke", help="end a replica's restore and bar it from another one")
    revoke.add_argument("--replica", required=True, metavar="ID")
    revoke.add_argument(
        "--hold-s", type=number(least=0.0), default=60.0, help="how long it is barred (default: 60)"
    )
    revoke.set_defaults(run=run_revoke)
    for sub in (pin, unpin, revoke):
        sub.add_argument(
            "--url",
            type=http_url,
            help=f"where the controller takes admin calls: admin.host and admin.port of its "
            f"user_config (default: {DEFAULT_URL})",
        )
        sub.add_argument(
            "--token-file",
            type=present_file,
            help=f"file with the admin token (default: environment variable {TOKEN_VARIABLE})",
        )
        add_json_flag(sub)


def _add_target(parser: argparse.ArgumentParser) -> "argparse._MutuallyExclusiveGroup":
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--replica", metavar="ID", help="one replica, as /dps/status names it")
    target.add_argument("--fleet", action="store_true", help="all replicas without a pin of theirs")
    return target


def run_pin(args: argparse.Namespace) -> int:
    """Pin a mode; exit status 0 when the controller, or the engine's page, has taken the order."""
    if args.key is not None:
        for option in ("url", "token_file"):
            if (value := getattr(args, option)) is not None:
                raise DpsConfigError(
                    f"--{option.replace('_', '-')} is {str(value)!r}: --key asks no controller; "
                    "leave one of the two out"
                )
        return _pin_engine(args)
    return _finish(args, "pin", _call(args, "PUT", f"pins/{_target(args)}", pin=args.mode))


def run_unpin(args: argparse.Namespace) -> int:
    """Take a pin back; exit status 0 when the controller has done so."""
    return _finish(args, "unpin", _call(args, "DELETE", f"pins/{_target(args)}"))


def run_revoke(args: argparse.Namespace) -> int:
    """Revoke a restore lease; exit status 0 when there was one."""
    path = f"leases/{quote(args.replica, safe='')}"
    return _finish(args, "revoke", _call(args, "DELETE", path, hold_s=args.hold_s))


def _pin_engine(args: argparse.Namespace) -> int:
    try:
        page = StatusPage.attach(args.key)
    except DpsConfigError:
        raise DpsConfigError(
            f"--key is {args.key!r}: no engine of this host has it; an engine's log gives its key, "
            "in the line with 'dps-ray admin pin'"
        ) from None
    page.set_pin(Pin(args.mode))
    page.close()
    report = Report("admin pin", {"key": args.key, "pin": args.mode})
    say(args, f"{args.mode}: the engine obeys at its next step, an idle one with its next request")
    return finish(args, report)


def _target(args: argparse.Namespace) -> str:
    return FLEET if args.fleet else quote(args.replica, safe="")


def _call(args: argparse.Namespace, method: str, path: str, **query: Any) -> dict[str, Any]:
    root = args.url if args.url is not None else DEFAULT_URL
    url = f"{root.rstrip('/')}/admin/{path}"
    try:
        answer = httpx.request(
            method,
            url,
            params=query,
            headers={"Authorization": f"Bearer {_token(args)}"},
            timeout=TIMEOUT_S,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DpsConfigError(
            f"--url is {root!r}: no controller takes orders there ({type(error).__name__}: "
            f"{error}); 'admin' in /dps/status says on which node, at which address, or why not"
        ) from None
    if not answer.is_success:
        raise DpsConfigError(
            f"{method} {url} was refused with {answer.status_code}: {_why(answer)}"
        )
    return dict(answer.json())


def _why(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or "no reason given"


def _token(args: argparse.Namespace) -> str:
    if args.token_file is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:
            raise DpsConfigError(f"{TOKEN_VARIABLE} is not set: set it, or give --token-file")
    else:
        try:
            token = args.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DpsConfigError(f"--token-file {args.token_file}: {error}") from None
    if not token.isascii() or not token.isprintable():
        raise DpsConfigError("the admin token has characters that no header can carry")
    return token


def _finish(args: argparse.Namespace, name: str, answer: dict[str, Any]) -> int:
    report = Report(f"admin {name}", answer)
    for key, value in answer.items():
        say(args, f"{key}: {value}")
    return finish(args, report)
