"""The command line's parser: a refusal is one line that names argument, value and remedy."""

import argparse
import re
import sys
from typing import Any, NoReturn

from dps_ray.choices import choose


class UsageError(Exception):
    """Words that are no command; the message begins with the command they were given to."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals read like those of the commands themselves.

    Types of arguments raise ``argparse.ArgumentTypeError`` with what follows the argument's name:
    ``is 'x': give a number``.
    """

    def error(self, message: str) -> NoReturn:
        """Refuse the words.

        Raises
        ------
        UsageError
            Always: the caller ends the process.
        """
        told = re.sub(r"^argument (.+?): is ", r"\1 is ", message)
        if told == message:
            told = f"{message.removeprefix('argument ')}; see {self.prog} --help"
        raise UsageError(f"{self.prog}: {told}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse would show choices as Python writes them."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"is {str(value)!r}: {choose(value, action.choices)}"
            )


def add_commands(parser: argparse.ArgumentParser, dest: str) -> Any:
    """Room for commands below ``parser``, which alone shows what they are for.

    Parameters
    ----------
    parser
        The parser of the command above them.
    dest
        What they are called in messages.
    """

    def show_help(args: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(run=show_help, prog=parser.prog)
    return parser.add_subparsers(dest=dest, title=f"{dest}s", metavar=dest)
