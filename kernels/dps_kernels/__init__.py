"""Linear algebra on nested FP8 weights: one call reads both byte planes or the upper one alone.

Compiled for the CPU with run-time dispatch (AVX2, AVX-512, portable); where the compiled library
is missing, the same functions run in plain torch.
"""

from dps_kernels.checksum import copy_rows, row_sums
from dps_kernels.elastic import new_access, prepare_elastic_linear
from dps_kernels.library import available, isa
from dps_kernels.linear import linear, linear_16bit, prepare_linear
from dps_kernels.moe import moe, prepare_moe, route
from dps_kernels.planes import (
    K16,
    PACKED,
    ROW_MAJOR,
    Layout,
    Planes,
    check_planes,
    preferred_layout,
    to_layout,
)
from dps_kernels.reconstruct import reconstruct
from dps_kernels.stream import read_all, zero_all

__all__ = [
    "K16",
    "PACKED",
    "ROW_MAJOR",
    "Layout",
    "Planes",
    "available",
    "check_planes",
    "copy_rows",
    "isa",
    "linear",
    "linear_16bit",
    "moe",
    "new_access",
    "preferred_layout",
    "prepare_elastic_linear",
    "prepare_linear",
    "prepare_moe",
    "read_all",
    "reconstruct",
    "route",
    "row_sums",
    "to_layout",
    "zero_all",
]
