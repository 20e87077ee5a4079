"""Types of arguments: each refuses a value at once, with what to give instead."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T", int, float)


def whole(least: int = 1) -> Callable[[str], int]:
    """A whole number of at least ``least``."""

    def parse(text: str) -> int:
        value = _parsed(int, text)
        if value is None or value < least:
            shown = repr(text) if value is None else text
            raise argparse.ArgumentTypeError(f"is {shown}: give a whole number of at least {least}")
        return value

    return parse


def number(*, above: float = -math.inf, least: float = -math.inf) -> Callable[[str], float]:
    """A finite number within bounds."""

    def parse(text: str) -> float:
        value = _parsed(float, text)
        if value is None or not (math.isfinite(value) and value > above and value >= least):
            shown = repr(text) if value is None else text
            bound = f"above {above:g}" if above > -math.inf else f"of at least {least:g}"
            raise argparse.ArgumentTypeError(f"is {shown}: give a number {bound}")
        return value

    return parse


def present_file(text: str) -> Path:
    """A file to read."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, a folder: give a file")
    if not path.exists():
        raise argparse.ArgumentTypeError(
            f"is {text!r}: there is no such file; give the path of one that exists"
        )
    return path


def picture_file(text: str) -> Path:
    """A file to draw to when the work is done."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"is {text!r}: there is no folder {path.parent}; make it first"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, a folder: give a file in it")
    return path


def result_folder(text: str) -> Path:
    """A folder for results, which is made when it is missing."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, a file: give a folder")
    return path


def http_url(text: str) -> str:
    """The root of a server."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}: {error}; give http://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        example = f"http://{text}" if "/" not in text else "http://127.0.0.1:8000"
        raise argparse.ArgumentTypeError(
            f"is {text!r}: give it with its scheme and host, such as {example}"
        )
    return text


def _parsed(kind: Callable[[str], T], text: str) -> T | None:
    try:
        return kind(text)
    except ValueError:
        return None
