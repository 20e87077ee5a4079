"""What depends on the GPU's generation: Ampere (8.0), Ada (8.9), Hopper (9.0)."""

from functools import cache
from typing import NamedTuple

import torch


class Arch(NamedTuple):
    """A GPU as the launchers see it."""

    sm: int
    """Compute capability times ten."""
    processors: int
    """Streaming multiprocessors."""
    shared_bytes: int
    """Shared memory of one of them, for all its blocks."""

    @property
    def descriptors(self) -> bool:
        """Whether the tensor memory accelerator copies tiles."""
        return self.sm >= 90

    @property
    def fp8(self) -> bool:
        """Whether the tensor cores multiply FP8."""
        return self.sm >= 89


@cache
def of_device(device: torch.device) -> Arch:
    """Give the architecture of a CUDA device.

    Raises
    ------
    RuntimeError
        For a GPU before Ampere.
    """
    properties = torch.cuda.get_device_properties(device)
    sm = properties.major * 10 + properties.minor
    if sm < 80:
        raise RuntimeError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}: "
            "nested weights need 8.0 (Ampere) or newer"
        )
    shared = properties.shared_memory_per_multiprocessor
    return Arch(sm, properties.multi_processor_count, shared)
