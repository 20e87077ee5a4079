"""The part of ``check engine`` where layers return ahead of the others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dps_ray.checks.parts import Part, Results, Say
from dps_ray.checks.requests import same_outputs
from dps_ray.checks.rounded_model import round_layers
from dps_ray.checks.specs import AMPLE_KV_BYTES, BLOCK_TOKENS, EXACT, EngineSpec
from dps_ray.report import Report

CHOSEN: dict[str, tuple[tuple[int, ...], ...]] = {
    "qwen3": ((0,), (0, 1, 2), (1, 3)),
    "qwen3-moe": ((1, 3),),
}
"""Layers that run in full precision, by tiny model: as they return, and in no order."""


def check_layers(folder: Path, chosen: Sequence[Sequence[int]], home: Path) -> Part:
    """Compare fast steps with full layers with plain vLLM on checkpoints rounded in the others.

    A plain engine knows nothing of modes and bytes: what it computes from a checkpoint that holds
    16-bit values in some layers and FP8 values in the others is what such a step must compute.

    Parameters
    ----------
    home
        Folder for the rounded checkpoints.
    """
    plain = [
        _spec(round_layers(folder, home / f"{folder.name}-{number}", layers))
        for number, layers in enumerate(chosen)
    ]
    mixed = replace(layer_spec(folder), scenario="layers", arguments={"chosen": [[], *chosen, []]})

    def judge(report: Report, say: Say, runs: Results) -> None:
        before, *ahead, after = runs[0]["runs"]
        report.check(
            "layers: no layer is full before or after its step", same_outputs(before, after)
        )
        for layers, ours, theirs in zip(chosen, ahead, runs[1:], strict=True):
            name = f"layers {list(layers)} of {folder.name}"
            report.check(f"{name}: full ones equal 16-bit, others FP8", same_outputs(ours, theirs))
            report.check(f"{name}: differ from fast mode", not same_outputs(ours, before))
            report.check(f"{name}: their tokens count as fast", ours["status"]["tokens_full"] == 0)
        say(f"layers: {len(chosen)} choices of layers in {folder.name} compared")

    return Part([mixed, *plain], judge)


def layer_spec(folder: Path) -> EngineSpec:
    """A static engine whose layers can be chosen."""
    return replace(_spec(folder), dps={**EXACT, "pin": "fast", "lend": False, "return_by": "layer"})


def _spec(folder: Path) -> EngineSpec:
    return EngineSpec(
        label=f"layers of {folder.name}",
        model=str(folder),
        kv_bytes=AMPLE_KV_BYTES,
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        # No prefix may outlive the choice of layers that computed it.
        enable_prefix_caching=False,
    )
