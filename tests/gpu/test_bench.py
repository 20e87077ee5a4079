"""``dps-ray bench kernels --device cuda`` on small layers, beside vLLM's own kernels."""

import json
from typing import Any

import pytest

from dps_ray.bench.kernels import shapes
from dps_ray.bench.kernels.device_cuda import CudaDevice
from dps_ray.cli.main import main

LINEAR = "256x512"
EXPERTS = shapes.Moe("small.experts", 8, 2, 256, 128)
TOKENS = (1, 5, 300)


def report(
    names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    monkeypatch.setattr(shapes, "SHAPES", (EXPERTS,))
    quick = ["--working-set-gb", "0.001", "--row-s", "0.01", "--max-rounds", "5"]
    tokens = ["--tokens", *map(str, TOKENS)]
    code = main(
        ["bench", "kernels", "--device", "cuda", "--shapes", *names, *tokens, *quick, "--json"]
    )
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == 0, printed
    return printed


@pytest.mark.parametrize("name", [LINEAR, EXPERTS.name])
def test_the_command_times_both_modes_beside_the_stock_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == EXPERTS.name and (lack := CudaDevice().lacks(EXPERTS)):
        pytest.skip(lack)
    rows = report([name], monkeypatch, capsys)["rows"]
    assert [row["tokens"] for row in rows] == list(TOKENS)
    for row in rows:
        assert row["rival"] == ("torch" if name == LINEAR else "vllm")
        assert all(row["us"][kernel] > 0 for kernel in ("full", "fast", row["rival"]))
    assert "full" in rows[0]["bandwidth_share"]
    assert "full" in rows[2]["peak_share"]
