"""What to say to somebody who named something that does not exist."""

from collections.abc import Iterable
from difflib import get_close_matches


def choose(given: object, choices: Iterable[object]) -> str:
    """The remedy: the nearest choice, where one is near, and all of them."""
    names = [str(choice) for choice in choices]
    return f"{nearest(given, names)}choose one of {', '.join(names)}"


def nearest(given: object, choices: Iterable[object], likeness: float = 0.6) -> str:
    """``did you mean 'x'? `` or nothing, for the beginning of a remedy."""
    names = [str(choice) for choice in choices]
    found = get_close_matches(str(given), names, n=1, cutoff=likeness)
    return f"did you mean {found[0]!r}? " if found else ""
