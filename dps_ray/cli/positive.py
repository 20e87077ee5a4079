"""Arguments that count something."""

import argparse

from dps_ray.config import DpsConfigError


def require_positive(args: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1 among the named arguments, lists included.

    Raises
    ------
    DpsConfigError
        With the flag and the number.
    """
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value < 1:
                flag = name.replace("_", "-")
                raise DpsConfigError(f"--{flag} is {value}: give numbers of at least 1")
