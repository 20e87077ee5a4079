"""Models that the project makes or converts itself, by name."""

from pathlib import Path

from dps_ray.choices import choose
from dps_ray.config import DpsConfigError
from dps_ray.models.smollm2 import prepare_smollm2
from dps_ray.models.tiny import TINY, make_tiny

SMOLLM2 = "smollm2"
TINY_PREFIX = "tiny:"
NAMED = (SMOLLM2, *(TINY_PREFIX + name for name in TINY))


def refusal(name: str) -> str | None:
    """What is wrong with a model's name or folder; ``None`` when nothing is."""
    if name in NAMED or Path(name, "config.json").is_file():
        return None
    return f"is {name!r}: {choose(name, NAMED)}, or a model's folder, which has a config.json"


def model_folder(name: str, dtype: str, root: Path) -> Path:
    """Folder of one of ``NAMED``, made when missing; anything else is a folder.

    Raises
    ------
    DpsConfigError
        There is no such model.
    """
    why = refusal(name)
    if why is not None:
        raise DpsConfigError(f"model {why}")
    if name == SMOLLM2:
        return prepare_smollm2(root, dtype=dtype)
    if name in NAMED:
        return make_tiny(name.removeprefix(TINY_PREFIX), root, dtype=dtype)
    return Path(name)
