"""Dispatch, the compiler's view of the operators, and the message where nothing is compiled."""

import importlib.util
import os
import subprocess
import sys

import dps_kernels
import pytest
import torch
from dps_kernels import library

from tests.kernels.weights import nested, normal, planes

COMPILED = dps_kernels.available()
compiled = pytest.mark.skipif(not COMPILED, reason="kernels are not compiled")

COMPARE = """
import sys, torch, dps_kernels as dk
torch.set_num_threads(1)
case = torch.load(sys.argv[1])
print(dk.isa())
for planes in case["planes"]:
    planes = dk.Planes(*planes, dk.Layout(*case["layout"]))
    out = torch.empty(planes.upper.shape, dtype=torch.bfloat16)
    dk.reconstruct(out, planes)
    assert torch.equal(out, case["out"].pop(0)), "reconstruct"
    torch.testing.assert_close(dk.linear(case["x"], planes), case["y"].pop(0), rtol=1e-5, atol=1e-5)
"""


INSTRUCTION_SETS = ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
LESSER = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(dps_kernels.isa())] if COMPILED else []
ROW_MAJOR_SETS = [isa for isa in LESSER if isa in ("portable", "avx2", "avx512")]


@pytest.mark.parametrize("isa", ROW_MAJOR_SETS)
def test_every_lesser_instruction_set_gives_the_same_results(isa, tmp_path):
    weights = [
        planes(nested((21, 75), fmt, torch.bfloat16), full)
        for fmt in ("e4m3", "e4m3_row", "e5m2")
        for full in (True, False)
    ]
    x = normal(7, 75)
    outs = [torch.empty(21, 75, dtype=torch.bfloat16) for _ in weights]
    for out, weight in zip(outs, weights, strict=True):
        dps_kernels.reconstruct(out, weight)
    case = {
        "planes": [tuple(weight)[:-1] for weight in weights],
        "layout": list(dps_kernels.ROW_MAJOR),
        "x": x,
        "out": outs,
        "y": [dps_kernels.linear(x, weight) for weight in weights],
    }
    torch.save(case, tmp_path / "case.pt")
    result = subprocess.run(
        [sys.executable, "-c", COMPARE, str(tmp_path / "case.pt")],
        env=os.environ | {"DPS_KERNELS_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == isa


@compiled
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 6, 11, 40])
def test_a_token_gets_the_same_bits_in_every_batch(tokens):
    weight = planes(nested((100, 200), "e4m3", torch.float16), True)
    x = normal(tokens, 200, dtype=torch.float16, seed=1)
    alone = torch.cat([dps_kernels.linear(row[None], weight) for row in x])
    assert torch.equal(dps_kernels.linear(x, weight), alone)


@compiled
def test_torch_compile_knows_the_shape_of_the_result():
    weight = planes(nested((20, 40), "e4m3", torch.float16), True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = weight._replace(upper=mode.from_tensor(weight.upper), lower=None)
        y = torch.ops.dps_kernels.linear(torch.empty(3, 40), fake.upper, None, False, None, None)
    assert y.shape == (3, 20)


def test_a_missing_library_is_said_once_with_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    library.available.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="Install again with a C\\+\\+ compiler"):
            assert not library.available()
        assert library.isa() == "torch"
    finally:
        library.available.cache_clear()


def test_a_library_of_another_torch_is_refused_with_its_reason(monkeypatch, tmp_path):
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    spec = importlib.util.spec_from_file_location("dps_kernels._C", broken)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    library.available.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="does not load"):
            assert not library.available()
    finally:
        library.available.cache_clear()


@compiled
def test_a_library_older_than_its_sources_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(library, "_OPERATORS", (*library._OPERATORS, "added_since"))
    library.available.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"older .*without added_since.*Install again"):
            assert not library.available()
    finally:
        library.available.cache_clear()
