"""Packed weights: bfloat16 dot products, on AMX and on AVX-512."""

import os
import subprocess
import sys

import pytest
import torch
from dps_kernels import PACKED, ROW_MAJOR, isa, library, linear, preferred_layout, prepare_linear

from tests.kernels import packed_cases
from tests.kernels.weights import nested, normal, planes

multiplies = pytest.mark.skipif(not library.has_packed(), reason="no bfloat16 dot products here")


@multiplies
@pytest.mark.parametrize("case", packed_cases.CASES, ids=lambda case: case.__name__)
def test_on_this_machine(case):
    case()


@pytest.mark.skipif(isa() != "amx", reason="nothing to lower")
def test_all_of_it_without_amx():
    result = subprocess.run(
        [sys.executable, "-m", packed_cases.__name__],
        env=os.environ | {"DPS_KERNELS_ISA": "avx512_bf16"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "avx512_bf16"


def test_only_whole_blocks_that_came_from_bfloat16_are_packed(monkeypatch):
    wanted = PACKED if library.has_packed() else ROW_MAJOR
    assert preferred_layout("cpu", 64, 32, torch.bfloat16) == wanted
    assert preferred_layout("cpu", 64, 32, torch.float16) == ROW_MAJOR
    assert preferred_layout("cpu", 96, 32, torch.bfloat16) == ROW_MAJOR
    assert preferred_layout("cpu", 64, 48, torch.bfloat16) == ROW_MAJOR


@pytest.mark.usefixtures("path")
def test_other_activations_than_bfloat16_give_the_same_product():
    weight = planes(nested((64, 96), "e4m3", torch.bfloat16), True)
    x = normal(3, 96, seed=1)
    y = linear(x, packed_cases.packed(weight))
    torch.testing.assert_close(y, linear(x, weight), rtol=1e-5, atol=1e-5)


@multiplies
def test_no_tokens_and_bad_arguments():
    weight = packed_cases.packed(planes(nested((64, 96), "e4m3_row", torch.bfloat16), True))
    bf16 = torch.bfloat16
    assert linear(torch.empty(0, 96, dtype=bf16), weight).shape == (0, 64)
    with pytest.raises(ValueError, match=r"x has shape \(2, 95\)"):
        linear(torch.empty(2, 95, dtype=bf16), weight)
    with pytest.raises(ValueError, match=r"bias has shape \(63,\)"):
        linear(torch.empty(2, 96, dtype=bf16), weight, torch.empty(63))
    with pytest.raises(ValueError, match="fmt is 'int8'"):
        linear(torch.empty(2, 96, dtype=bf16), weight._replace(fmt="int8"))
    if library.has_packed():
        with pytest.raises(TypeError, match=r"x is torch.float32: the weight was prepared for"):
            prepare_linear(weight, bf16)(torch.empty(2, 96), None)
    with pytest.raises(ValueError, match="lower has shape"):
        linear(torch.empty(2, 96, dtype=bf16), weight._replace(lower=weight.lower[:32]))
