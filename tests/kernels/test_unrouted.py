"""A mixture reads the experts that its tokens are routed to, and no others."""

import signal
import subprocess
import sys

import dps_kernels
import pytest

from tests.kernels import unrouted_cases

pytestmark = pytest.mark.skipif(not dps_kernels.available(), reason="kernels are not compiled")


def run(case: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", unrouted_cases.__name__, case],
        capture_output=True,
        text=True,
        check=False,
    )


def test_experts_without_tokens_are_never_read() -> None:
    result = run("check")
    assert result.returncode == 0, result.stderr


def test_an_expert_that_is_read_ends_the_process() -> None:
    assert run("touch").returncode == -signal.SIGSEGV
