"""Memory at its own speed."""

import pytest
import torch
from dps_kernels import zero_all


@pytest.mark.parametrize("start", [0, 1, 63])
@pytest.mark.parametrize("size", [0, 1, 64, 1000, 8192])
def test_all_bytes_are_zeroed_and_none_around_them(start: int, size: int) -> None:
    around = torch.ones(9000, dtype=torch.uint8)
    zero_all(around[start : start + size])
    assert around.sum() == 9000 - size
    assert not around[start : start + size].any()
