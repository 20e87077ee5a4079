"""The part of ``check engine`` about the default kernel, which sums in an order of its own."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dps_ray.checks.mode_check import mode_specs, static_fast_spec
from dps_ray.checks.parts import Part, Results, Say
from dps_ray.checks.requests import logprob_distance, same_outputs
from dps_ray.checks.specs import AUTO, EngineSpec
from dps_ray.report import Report

FUSED_BOUND = 0.25
"""Largest difference of a logprob that the default kernel's sums may make on the tiny qwen3.

A tiny mixture keeps to it up to the first token of a text for which rounding chooses other experts,
which takes two experts whose logits are almost equal; behind that there is no bound."""


def check_fused(label: str, folder: Path) -> Part:
    """The default kernel beside the exact one, in either mode."""
    plain, switching, _ = mode_specs(label, folder, 1)
    return Part(
        [plain, static_fast_spec(label, plain), fused_spec(switching)], partial(_judge, label)
    )


def fused_spec(switching: EngineSpec) -> EngineSpec:
    """The switching engine of ``mode_specs`` with the default kernel instead of the exact one."""
    label = switching.label.replace("switching", "default kernel")
    return replace(switching, label=label, dps={**AUTO, "lend": False})


def fused_distances(
    fused: dict[str, Any], plain: dict[str, Any], fast: dict[str, Any]
) -> dict[str, float]:
    """How far the default kernel's logprobs are from plain vLLM's and the exact fast mode's."""
    return {
        "full": logprob_distance(fused["full"], plain),
        "fast": logprob_distance(fused["fast"], fast),
    }


def _judge(label: str, report: Report, say: Say, runs: Results) -> None:
    plain, fast, fused = runs
    distances = fused_distances(fused, plain, fast)
    for mode, distance in distances.items():
        report.check(
            f"{label}: default kernel, {mode} mode: logprobs within {FUSED_BOUND} of the exact one",
            distance <= FUSED_BOUND,
        )
    report.check(
        f"{label}: default kernel, full mode after fast mode equals full mode",
        same_outputs(fused["full"], fused["full again"])
        and not same_outputs(fused["full"], fused["fast"]),
    )
    report.figures["default kernel"] = {"model": label, "logprob_distance": distances}
    say(f"{label}: default kernel within {max(distances.values()):.3f} of the exact one's logprobs")
