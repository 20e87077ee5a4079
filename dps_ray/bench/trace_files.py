"""Readers of published trace files; the header line tells the format."""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import as_file, files
from pathlib import Path

from dps_ray.bench.traces import TraceRequest, from_origin
from dps_ray.choices import choose
from dps_ray.config import DpsConfigError

BUNDLED = {"azure-2023-code-excerpt": "azure_2023_code_excerpt.csv"}
"""Traces that come with the package, by name."""


def _azure_time_s(text: str) -> float:
    """``2023-11-16 18:17:03.9799600``, with a time zone in the 2024 files; seconds."""
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


@dataclass(frozen=True)
class Format:
    """Column names of one kind of trace file."""

    name: str
    arrival: str
    prompt: str
    output: str
    arrival_s: Callable[[str], float]
    """Parses the arrival column, seconds from any origin."""
    empty_output_is_failure: bool = False
    """Rows without an output token record failures of the traced system and are left out."""


FORMATS = (
    Format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _azure_time_s),
    Format(
        "burstgpt",
        "Timestamp",
        "Request tokens",
        "Response tokens",
        float,
        empty_output_is_failure=True,
    ),
    Format("vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", float),
)


def read_trace(source: str | Path) -> list[TraceRequest]:
    """Read a trace file, or a bundled trace by its name.

    Parameters
    ----------
    source
        Path of a CSV file with the columns of the Azure LLM inference traces of 2023 and 2024,
        of BurstGPT or of vidur; or a name in ``BUNDLED``.

    Returns
    -------
    list of TraceRequest
        In order of arrival, the first at 0 s.

    Raises
    ------
    DpsConfigError
        The file is missing, empty, of no known format, or has a wrong value; the message names
        file, line and column.
    """
    if str(source) in BUNDLED:
        with as_file(files("dps_ray.bench") / "data" / BUNDLED[str(source)]) as path:
            return _read(path)
    path = Path(source)
    if not path.is_file():
        raise DpsConfigError(
            f"trace is {str(source)!r}, which is no file: {choose(source, BUNDLED)}, or give a path"
        )
    return _read(path)


def _read(path: Path) -> list[TraceRequest]:
    # utf-8-sig: some of the published files start with a byte-order mark.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        layout = _format(path, reader.fieldnames or ())
        requests = from_origin(_rows(path, layout, reader))
    if not requests:
        raise DpsConfigError(f"{path} holds no request: give a trace with at least one row")
    return requests


def _format(path: Path, columns: object) -> Format:
    names = set(columns) if isinstance(columns, list | tuple) else set()
    for layout in FORMATS:
        if {layout.arrival, layout.prompt, layout.output} <= names:
            return layout
    known = "; ".join(
        f"{each.name}: {each.arrival},{each.prompt},{each.output}" for each in FORMATS
    )
    raise DpsConfigError(f"{path}, line 1: columns are {sorted(names)}: needed are {known}")


def _rows(path: Path, layout: Format, reader: "csv.DictReader[str]") -> Iterator[TraceRequest]:
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        arrival_s = _value(where, row, layout.arrival, layout.arrival_s)
        prompt_tokens = int(_value(where, row, layout.prompt, int))
        output_tokens = int(_value(where, row, layout.output, int))
        if output_tokens == 0 and layout.empty_output_is_failure:
            continue
        yield TraceRequest(arrival_s, max(1, prompt_tokens), max(1, output_tokens))


def _value(where: str, row: dict[str, str], column: str, parse: Callable[[str], float]) -> float:
    text = row.get(column)
    try:
        value = parse(text or "")
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise DpsConfigError(f"{where}, column {column!r} is {text!r}: give a value of at least 0")
    return value
