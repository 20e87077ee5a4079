"""The engine checks themselves, on real engines, and the control that shows they can fail."""

import os
from pathlib import Path

import pytest

from dps_ray.checks.engine_check import check_engine
from dps_ray.checks.mode_check import mode_specs
from dps_ray.checks.move_check import check_shadow
from dps_ray.checks.parts import run_parts
from dps_ray.checks.process import run_engines
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import TINY, make_tiny
from dps_ray.report import Report

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

WITHOUT_ZEROING = """
import dataclasses

from dps_ray.memory.manager import MemoryManager

apply = MemoryManager.apply


def apply_without_zeroing(self, command, fence):
    apply(self, dataclasses.replace(command, zero=()), fence)


MemoryManager.apply = apply_without_zeroing
"""


WITHOUT_NEW_IDS = """
import dps_ray.engine.block_tables

dps_ray.engine.block_tables.redirect = lambda runner, moves: None
"""


def test_every_engine_check_holds_on_every_architecture() -> None:
    said: list[str] = []
    report = check_engine(
        tuple(TINY), cache_root(), cycles=10, load_cycles=10, floor_requests=200, say=said.append
    )
    assert report.ok, [name for name, passed in report.checks.items() if not passed]
    assert report.figures["burst"]["preemptions_plain"] > 0
    assert any("tp=2" in name for name in report.checks)
    used = {fmt for run in report.figures["modes"].values() for fmt in run["formats"]}
    assert used == {"e4m3", "e5m2", "e4m3_row"}


def test_lent_memory_that_is_not_zeroed_shows_in_the_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("qwen3", cache_root())
    _, static, elastic = mode_specs("control", folder, 1)
    # Python imports this module in every process it starts, before anything else.
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ZEROING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    # Static memory is never zeroed: the mutant changes nothing there.
    expected, mutant = run_engines([static, elastic])
    assert mutant["units_lent"] > 0
    assert mutant["nans"] > 0 or mutant["logprobs"] != expected["fast"]["logprobs"]


def test_a_moved_block_that_the_runner_does_not_learn_of_shows_in_the_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NEW_IDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    report = Report("control")
    part = check_shadow(make_tiny("qwen3", cache_root()), 3, tmp_path)
    (results,) = run_parts([part])
    part.judge(report, lambda _: None, results)
    assert report.figures["load"]["blocks_moved"] > 0
    assert not report.checks[
        "load: 3 full/fast cycles equal a shadow on static memory, tokens and logprobs"
    ]
