"""Memory at its own speed: read once, which is the ceiling of the kernels, and zeroed."""

from torch import Tensor

from dps_kernels.library import native, runs_compiled


def read_all(data: Tensor) -> None:
    """Read every cache line of a contiguous tensor, on torch's threads, and keep nothing.

    Without the compiled library torch's own sum reads it, somewhat below what the memory gives.
    """
    if runs_compiled(data):
        native().read_all(data)
    else:
        data.sum()


def zero_all(data: Tensor) -> None:
    """Fill a contiguous uint8 tensor with zeros in the calling thread, past the caches."""
    if runs_compiled(data):
        native().zero_all(data)
    else:
        data.numpy().fill(0)
