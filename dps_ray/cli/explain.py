"""``dps-ray explain``: why a request would go, or went, to a replica and not to another."""

import argparse
import time
from typing import Any

import httpx

from dps_ray.cli.arguments import http_url
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.config import DpsConfigError
from dps_ray.modes import Floor
from dps_ray.report import Report

TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``explain``."""
    parser.add_argument(
        "--request", metavar="ID", help="one that was sent, by its X-Request-ID; default: a new one"
    )
    parser.add_argument("--floor", choices=tuple(Floor), default=Floor.ANY)
    parser.add_argument("--session", metavar="NAME", help="as X-DPS-Session would say")
    parser.add_argument("--policy", metavar="NAME", help="another policy than the live one")
    parser.add_argument("--replica", metavar="ID", help="only this one, beside the first choice")
    parser.add_argument("--application", metavar="NAME", help="where the controller knows several")
    parser.add_argument(
        "--url",
        type=http_url,
        default="http://127.0.0.1:8000/dps",
        help="route of the controller's application (default: http://127.0.0.1:8000/dps)",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the controller and print its answer; exit status 0 when it has one."""
    names = ("request", "floor", "session", "policy", "replica", "application")
    answer = _ask(args.url, {name: value for name in names if (value := getattr(args, name))})
    for line in lines(answer):
        say(args, line)
    report = Report("explain", answer)
    return finish(args, report)


def lines(answer: dict[str, Any]) -> list[str]:
    """The controller's answer for people."""
    asks = f"floor {answer['floor']}" + (", with a session" if answer["session"] else "")
    if "request_id" in answer:
        ago_s = max(0.0, time.time() - answer["time_s"])
        taken = answer["accepted_by"]
        result = [
            f"request {answer['request_id']}, {ago_s:.1f} s ago: {asks}, "
            f"policy {answer['policy']}, decision {answer['decisions']}",
            f"taken by {taken}" if taken else "not taken by any replica so far",
        ]
        if answer["probe"]:
            result.append("a probe: the first was tried to learn about it, against the order")
    else:
        result = [
            f"a new request to {answer['application']}: {asks}, policy {answer['policy']['name']}, "
            f"{answer['routers']} routers"
        ]
    if answer["choice"] is None:
        result.append("no replica may serve it")
    rows = [_cells(candidate) for candidate in answer["candidates"]]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        result.append("  ".join([*cells, row[4]]))
    if answer.get("not_known"):
        result.append("A router also knows, and may decide otherwise by:")
        result += [f"  - {what}" for what in answer["not_known"]]
    return result


def _cells(candidate: dict[str, Any]) -> list[str]:
    reason = candidate["reason"]
    cost = sum(term["value"] * term["weight"] for term in reason["terms"]) if reason else None
    known = [candidate["standing"]] if candidate["standing"] else []
    if candidate["age_s"] is not None:
        known.append(f"{candidate['age_s']:.1f} s old")
    return [
        str(candidate["place"] or "-"),
        candidate["replica_id"],
        candidate["tier"],
        "-" if cost is None else f"{cost:.3f}",
        candidate["why"] + (f" ({', '.join(known)})" if known else ""),
    ]


def _ask(url: str, query: dict[str, str]) -> dict[str, Any]:
    try:
        answer = _get(url, query)
        if answer.status_code == 429:
            # All who ask share one limit.
            time.sleep(_retry_after_s(answer))
            answer = _get(url, query)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DpsConfigError(
            f"--url is {url!r}: no controller answers there ({type(error).__name__}: {error})"
        ) from None
    if not answer.is_success:
        try:
            why = str(answer.json()["detail"])
        except (ValueError, KeyError, TypeError):
            why = answer.text[:200] or "no reason given"
        raise DpsConfigError(f"the controller refuses with {answer.status_code}: {why}")
    return dict(answer.json())


def _get(url: str, query: dict[str, str]) -> httpx.Response:
    return httpx.get(f"{url.rstrip('/')}/explain", params=query, timeout=TIMEOUT_S)


def _retry_after_s(answer: httpx.Response) -> float:
    """Never longer than somebody at a terminal would wait."""
    told = answer.headers.get("Retry-After", "")
    return min(float(told), MAX_RETRY_AFTER_S) if told.isdecimal() else 1.0
