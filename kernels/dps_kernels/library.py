"""Loading the compiled library, once, and what is there to use instead."""

import importlib.util
import warnings
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from torch import Tensor

_CALLABLES = (
    "Access",
    "ElasticLinear",
    "Experts",
    "Linear",
    "Planes",
    "copy_rows",
    "has_packed",
    "isa",
    "linear_16bit",
    "read_all",
    "reconstruct",
    "route",
    "row_sums",
    "zero_all",
)
"""All that the compiled library must offer."""

_PACKAGE = Path(__file__).parent


@cache
def _load() -> ModuleType | None:
    # Here only: another installation's library would be of other sources.
    spec = PathFinder.find_spec("dps_kernels._C", [str(_PACKAGE)])
    if spec is None or spec.loader is None:
        why = f"was not built: {_reason()}"
    else:
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            why = f"does not load ({error})"
        else:
            missing = [name for name in _CALLABLES if not hasattr(module, name)]
            if not missing:
                module.isa()
                return module
            why = f"is older than its sources (without {', '.join(missing)})"
    warnings.warn(
        f"dps_kernels: the compiled library {why}; running the slow torch path. "
        "To install again: pip install --no-deps --no-build-isolation -e .",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


def available() -> bool:
    """Whether the compiled CPU kernels are loaded; says once, as a warning, why they are not.

    Raises
    ------
    ValueError
        ``DPS_KERNELS_ISA`` names no instruction set.
    """
    return _load() is not None


def native() -> ModuleType:
    """Give the compiled library, where it is available."""
    module = _load()
    assert module is not None
    return module


def isa() -> str:
    """Instruction set in use; ``torch`` without compiled kernels.

    From the best down: ``amx``, ``avx512_bf16``, ``avx512``, ``avx2``, ``portable``.
    """
    return str(native().isa()) if available() else "torch"


@cache
def has_packed() -> bool:
    """Whether the instruction set multiplies packed bfloat16 weights."""
    return available() and bool(native().has_packed())


def runs_compiled(tensor: Tensor) -> bool:
    """Whether calls on this tensor go to the compiled kernels."""
    return tensor.device.type == "cpu" and available()


def _reason() -> str:
    """What the build wrote beside the modules when it left the library out."""
    note = _PACKAGE / "not_compiled.txt"
    return note.read_text() if note.exists() else "no build has run here"
