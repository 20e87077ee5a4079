"""Dispatch, and the message where nothing is compiled."""

import os
import subprocess
import sys
from pathlib import Path

import dps_kernels
import pytest
import torch
from dps_kernels import library

from tests.kernels.weights import nested, normal, planes

COMPILED = dps_kernels.available()
compiled = pytest.mark.skipif(not COMPILED, reason="kernels are not compiled")

FILES = ("test_linear.py", "test_moe.py", "test_reconstruct.py")
IN_A_LESSER_SET = """
import sys, dps_kernels, pytest
from tests.kernels.unrouted_cases import only_routed_experts_are_read
assert dps_kernels.isa() == sys.argv[1], dps_kernels.isa()
only_routed_experts_are_read()
sys.exit(pytest.main(["-q", "-k", "compiled", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""

INSTRUCTION_SETS = ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
LESSER = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(dps_kernels.isa())] if COMPILED else []
ROW_MAJOR_SETS = [isa for isa in LESSER if isa in ("portable", "avx2", "avx512")]


def run_lowered(isa: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", *words],
        env=os.environ | {"DPS_KERNELS_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("isa", ROW_MAJOR_SETS)
def test_every_lesser_instruction_set_passes_the_same_tests(isa):
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    result = run_lowered(isa, IN_A_LESSER_SET, isa, *files)
    assert result.returncode == 0, result.stdout + result.stderr


@compiled
def test_an_unknown_instruction_set_is_refused_with_the_known_ones():
    result = run_lowered("avx51", "import dps_kernels; dps_kernels.available()")
    assert result.returncode
    assert "DPS_KERNELS_ISA is 'avx51': use portable, avx2, avx512" in result.stderr


@compiled
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 6, 11, 40])
def test_a_token_gets_the_same_bits_in_every_batch(tokens):
    weight = planes(nested((100, 200), "e4m3", torch.float16), True)
    x = normal(tokens, 200, dtype=torch.float16, seed=1)
    alone = torch.cat([dps_kernels.linear(row[None], weight) for row in x])
    assert torch.equal(dps_kernels.linear(x, weight), alone)


def test_a_missing_library_is_said_once_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    library._load.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="To install again: pip install"):
            assert not library.available()
        assert library.isa() == "torch"
    finally:
        library._load.cache_clear()


def test_a_library_of_another_torch_is_refused_with_its_reason(monkeypatch, tmp_path):
    (tmp_path / "_C.so").write_bytes(b"not a library")
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    library._load.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="does not load"):
            assert not library.available()
    finally:
        library._load.cache_clear()


@compiled
def test_a_library_older_than_its_sources_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(library, "_CALLABLES", (*library._CALLABLES, "added_since"))
    library._load.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"older .*without added_since.*To install again"):
            assert not library.available()
    finally:
        library._load.cache_clear()
