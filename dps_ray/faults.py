"""Faults that pydantic finds in a configuration, as sentences."""

import re
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dps_ray.choices import choose

_ALTERNATIVE = re.compile(
    r"(bool|int|float|str|none|any|constrained-\w+"
    r"|(literal|is-instance|list|dict|tuple|set|lax-or-strict|json-or-python|function-\w+)\[.*)$"
)
"""How pydantic names the alternatives of a union, which are no part of a field's path."""
_LONGEST_SHOWN = 160
_QUOTE, _QUOTED = "'", r"'([^']*)'"


def faults_of(error: ValidationError, where: str) -> list[str]:
    """The faults in a pydantic error, one sentence each: field, value, remedy."""
    found: dict[str, list[str]] = {}
    for item in error.errors():
        beginning, remedy = _fault(item, where)
        remedies = found.setdefault(beginning, [])
        if remedy not in remedies:
            remedies.append(remedy.removeprefix("Input should be ") if remedies else remedy)
    return [f"{beginning}: {' or '.join(remedies)}" for beginning, remedies in found.items()]


def _fault(item: ErrorDetails, where: str) -> tuple[str, str]:
    """Field and value, and the remedy."""
    kind, context, given = item["type"], item.get("ctx", {}), item["input"]
    path = [str(part) for part in item["loc"]]
    while path and _ALTERNATIVE.match(path[-1]):
        path.pop()
    field = ".".join([where, *path])
    message = item["msg"].removeprefix("Value error, ")
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{field} is not an option", "remove it or correct its spelling"
    if kind == "missing":
        return f"{field} is missing", "it has no default"
    if kind == "union_tag_invalid":
        tag, tags = context["tag"], re.findall(_QUOTED, context["expected_tags"])
        name = context["discriminator"].strip(_QUOTE)
        return f"{field}.{name} is {tag!r}", choose(tag, tags)
    if kind in ("literal_error", "enum") and isinstance(given, str):
        choices = re.findall(_QUOTED, context["expected"])
        # Those that are numbers stand there without quotes.
        message = choose(given, choices) if choices else message
    if kind == "value_error" and (not item["loc"] or isinstance(given, Mapping | list)):
        # A relation of several fields, which the message names with their values.
        return field, message
    shown = repr(given)
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}..."
    return f"{field} is {shown}", message
