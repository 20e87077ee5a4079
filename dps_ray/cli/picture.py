"""Pictures that a command draws when its work is done."""

import argparse
from pathlib import Path


def picture_file(text: str) -> Path:
    """Take a file to draw to, or refuse it before the work begins.

    Raises
    ------
    argparse.ArgumentTypeError
        There is no such folder, or a folder stands there.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r}: there is no folder {path.parent}; make it first"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: give a file in it")
    return path
