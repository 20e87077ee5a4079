"""The table of tiles: the checked-in one or one that an operator names, read and checked once."""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

CHECKED_IN = Path(__file__).parent / "tiles.json"
OVERRIDE = "DPS_KERNELS_TILES"
"""Environment variable that names another table."""

_NESTED = ("full", "fast", "moe full", "moe fast")
KINDS = {
    "sm80": _NESTED,
    "sm89": (*_NESTED, "fp8", "moe fp8"),
    "sm90": (*_NESTED, "fp8", "moe fp8"),
}
"""What a table holds for each generation; ``KIND NxK`` besides, for one shape of weight."""

_FIELDS = ("bm", "bn", "bk", "warps", "stages")
_POWERS_OF_TWO = ("bm", "bn", "bk", "warps")

Entry = dict[str, Any]
"""Fields of a tile, and up to how many ``tokens`` it serves; ``None`` for all above."""
Kinds = dict[str, list[Entry]]


class TileTableError(ValueError):
    """A table that no tile can be taken from: variable, path, what is wrong with it, remedy."""


def kinds_of(generation: str) -> Kinds:
    """Give the entries for a generation of GPUs, by kind and by kind and shape.

    Raises
    ------
    TileTableError
        If the table is missing, unreadable, wrong or without that generation.
    """
    path = os.environ.get(OVERRIDE) or str(CHECKED_IN)
    table = _read_once(path)
    if generation not in table:
        raise _error(OVERRIDE, path, f"has no {generation!r}, which is this GPU")
    return table[generation]


def read(path: str, named: str = OVERRIDE) -> dict[str, Kinds]:
    """Read and check a table; ``named`` is the variable or option that names the file.

    Raises
    ------
    TileTableError
        If it is missing, unreadable or wrong.
    """
    try:
        table = json.loads(Path(path).read_text())
    except OSError as error:
        raise _error(named, path, f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _error(named, path, f"is no JSON ({error})") from None
    fault = _fault(table)
    if fault:
        raise _error(named, path, fault)
    made: dict[str, Kinds] = table
    return made


_read_once = cache(read)


def _error(named: str, path: str, fault: str) -> TileTableError:
    return TileTableError(
        f"{named} is {path!r}, which {fault}: write a table with "
        f"'python -m dps_kernels.hopper.autotune NxK --output FILE', or leave {named} out"
    )


def _fault(table: Any) -> str | None:
    """What is wrong with a table, as the end of a sentence."""
    if not isinstance(table, dict) or not table:
        return "is no object with a key for each generation of GPUs"
    for generation, kinds in table.items():
        if generation not in KINDS:
            return f"has {generation!r}: generations are {', '.join(KINDS)}"
        if not isinstance(kinds, dict):
            return f"has no object under {generation!r}"
        missing = [kind for kind in KINDS[generation] if kind not in kinds]
        if missing:
            return f"has no {missing[0]!r} under {generation!r}"
        for key, entries in kinds.items():
            if re.sub(r" \d+x\d+$", "", key) not in KINDS[generation]:
                return f"has {key!r} under {generation!r}, which names no kernel"
            fault = _fault_of_entries(entries)
            if fault:
                return f"has {fault} under {generation!r}, {key!r}"
    return None


def _fault_of_entries(entries: Any) -> str | None:
    if not isinstance(entries, list) or not entries:
        return "no list of tiles"
    least = 0
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict) or "tokens" not in entry:
            return f"no 'tokens' in tile {place}"
        tokens, last = entry["tokens"], place == len(entries) - 1
        if last is not (tokens is None):
            return f"'tokens' {tokens} in tile {place}: the last is null and no other"
        if not last and (type(tokens) is not int or tokens <= least):
            return f"'tokens' {tokens} in tile {place}, which do not rise"
        least = tokens
        for field in _FIELDS:
            if field not in entry:
                return f"no {field!r} in tile {place}"
        for field, value in entry.items():
            if field not in ("tokens", "splits", *_FIELDS):
                return f"{field!r} in tile {place}, which is no field of a tile"
            if field != "tokens" and not _possible(field, value):
                return f"{field} {value!r} in tile {place}, which no GPU can run"
    return None


def _possible(field: str, value: Any) -> bool:
    if type(value) is not int or value < (field != "splits"):
        return False
    return field not in _POWERS_OF_TWO or value & (value - 1) == 0
