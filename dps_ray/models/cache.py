"""Where prepared models live, and how a model folder comes into being in one step."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """Folder of prepared models: ``$DPS_RAY_CACHE/models``, else ``.cache/models`` here."""
    return Path(os.environ.get("DPS_RAY_CACHE", ".cache")).resolve() / "models"


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """Give a scratch folder that becomes ``target`` when the block ends without an error.

    A reader therefore sees either no folder or a complete one. When another process finishes the
    same folder first, its result is kept and this one is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
