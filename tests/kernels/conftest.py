"""Every test here runs on the compiled kernels and on the torch path that stands in for them."""

import pytest
from dps_kernels import available, library


@pytest.fixture(params=["compiled", "torch"])
def path(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(library, "available", lambda: False)
    elif not available():
        pytest.skip("the compiled kernels are not installed")
    return request.param
