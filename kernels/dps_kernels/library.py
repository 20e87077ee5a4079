"""Loading the compiled library, once, and what is there to use instead."""

import warnings
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import torch
from torch import Tensor

_OPS = "dps_kernels"
_OPERATORS = (
    "copy_rows",
    "has_packed",
    "isa",
    "linear",
    "linear_16bit",
    "linear_packed",
    "moe",
    "moe_packed",
    "read_all",
    "reconstruct",
    "route",
    "row_sums",
    "zero_all",
)
"""All that the compiled library must offer."""

_PACKAGE = Path(__file__).parent


@cache
def available() -> bool:
    """Whether the compiled CPU kernels are loaded; says once, as a warning, why they are not.

    Raises
    ------
    ValueError
        ``DPS_KERNELS_ISA`` names no instruction set.
    """
    # Here only: another installation's library would be of other sources.
    spec = PathFinder.find_spec("dps_kernels._C", [str(_PACKAGE)])
    if spec is None or spec.origin is None:
        why = f"was not built: {_reason()}"
    else:
        try:
            torch.ops.load_library(spec.origin)
        except OSError as error:
            why = f"does not load ({error})"
        else:
            compiled = getattr(torch.ops, _OPS)
            missing = [name for name in _OPERATORS if not hasattr(compiled, name)]
            if not missing:
                compiled.isa()
                _register_fakes()
                return True
            why = f"is older than its sources (without {', '.join(missing)})"
    warnings.warn(
        f"dps_kernels: the compiled library {why}; running the slow torch path. "
        "To install again: pip install --no-deps --no-build-isolation -e .",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def isa() -> str:
    """Instruction set in use; ``torch`` without compiled kernels.

    From the best down: ``amx``, ``avx512_bf16``, ``avx512``, ``avx2``, ``portable``.
    """
    return str(torch.ops.dps_kernels.isa()) if available() else "torch"


@cache
def has_packed() -> bool:
    """Whether the instruction set multiplies packed bfloat16 weights."""
    return available() and bool(torch.ops.dps_kernels.has_packed())


def runs_compiled(tensor: Tensor) -> bool:
    """Whether calls on this tensor go to the compiled kernels."""
    return tensor.device.type == "cpu" and available()


def _reason() -> str:
    """What the build wrote beside the modules when it left the library out."""
    note = _PACKAGE / "not_compiled.txt"
    return note.read_text() if note.exists() else "no build has run here"


def _register_fakes() -> None:
    """Tell torch.compile the shapes of the results."""

    @torch.library.register_fake(f"{_OPS}::linear_packed")
    @torch.library.register_fake(f"{_OPS}::linear")
    def _linear(x: Tensor, upper: Tensor, *_: object) -> Tensor:
        return x.new_empty((*x.shape[:-1], upper.shape[0]))

    @torch.library.register_fake(f"{_OPS}::linear_16bit")
    def _linear_16bit(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @torch.library.register_fake(f"{_OPS}::moe_packed")
    @torch.library.register_fake(f"{_OPS}::moe")
    def _moe(x: Tensor, *_: object) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake(f"{_OPS}::route")
    def _route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        shape = (logits.shape[0], top_k)
        return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(
            shape, dtype=torch.int64
        )

    @torch.library.register_fake(f"{_OPS}::reconstruct")
    def _reconstruct(*_: object) -> None:
        return None
