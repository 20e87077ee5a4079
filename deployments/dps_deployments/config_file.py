"""A YAML file read twice: as values, and as nodes that know their lines."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dps_ray.config import DpsConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in a file."""

    line: int
    """From 1."""
    text: str


class UnreadableFileError(DpsConfigError):
    """A file that holds no values."""

    def __init__(self, path: Path, line: int, why: str) -> None:
        super().__init__(f"config is {str(path)!r}, which {why}")
        self.problem = Problem(line, f"the file {why}")


@dataclass(frozen=True)
class ConfigFile:
    """Values of a file, and where they stand."""

    document: Any
    root: yaml.Node | None
    duplicates: tuple[Problem, ...]
    """Keys that stand twice in one mapping: YAML keeps the last of them in silence."""

    def line_of(self, path: str) -> int:
        """Line of the key that a dotted path leads to, or of the last part of it that exists.

        Parts that are not in the file are skipped: pydantic names chosen alternatives in a path.
        """
        node, line = self.root, 1
        for part in path.split("."):
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == part:
                        node, line = value, key.start_mark.line + 1
                        break
            elif isinstance(node, yaml.SequenceNode) and part.isdigit():
                node = node.value[int(part)]
                line = node.start_mark.line + 1
        return line


def read_config_file(path: Path) -> ConfigFile:
    """Read a YAML file.

    Raises
    ------
    UnreadableFileError
        When it cannot be read, or is no YAML.
    """
    try:
        text = path.read_text()
        _refuse_circles(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return ConfigFile(yaml.safe_load(text), root, tuple(_duplicates(root, set())))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UnreadableFileError(path, 1, f"cannot be read: {why}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark is not None else 1
        told = "; ".join(part for part in (error.context, error.problem) if part)
        raise UnreadableFileError(path, line, f"is not YAML, line {line}: {told}") from None
    except yaml.YAMLError as error:
        raise UnreadableFileError(path, 1, f"is not YAML: {error}") from None
    except RecursionError:
        raise UnreadableFileError(path, 1, "is nested too deeply to be read: flatten it") from None


def _refuse_circles(text: str) -> None:
    """An alias inside of what its anchor names would make values without an end."""
    open_anchors: list[str | None] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in open_anchors:
            raise yaml.MarkedYAMLError(
                problem=f"*{event.anchor} stands inside of what &{event.anchor} names: remove one "
                "of the two",
                problem_mark=event.start_mark,  # type: ignore[arg-type]  # of libyaml or not
            )


def _duplicates(node: yaml.Node | None, seen: set[int]) -> Iterator[Problem]:
    """Of a node that an alias names, only once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _duplicates(entry, seen)
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in first:
                yield Problem(
                    line,
                    f"{key.value} stands already in line {first[key.value]} of the same mapping: "
                    "remove one of the two",
                )
            first.setdefault(key.value, line)
            yield from _duplicates(value, seen)
