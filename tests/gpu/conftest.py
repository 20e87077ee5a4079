"""Every test here needs a CUDA device and is skipped without one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dps_ray.memory.cuda_driver import CudaDriver

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    torch.cuda.init()
    torch.cuda.empty_cache()
    driver = CudaDriver(torch.cuda.current_device())
    yield driver
    driver.close()
