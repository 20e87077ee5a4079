"""The CPU worker without a model: what its steps tell the restore's pacing."""

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.cpu_worker as cpu_worker

from dps_ray.commands import StepCommand
from dps_ray.config import DpsOptions
from dps_ray.engine import rank as ranks
from dps_ray.engine import worker as our_worker
from dps_ray.engine.status_page import StatusPage
from dps_ray.engine.worker import DpsCpuWorker
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.pacing import Pacer
from dps_ray.modes import Mode

CHUNK_BYTES = 4 << 20


class Worker(DpsCpuWorker):
    """A worker whose forward passes compute nothing."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace()


@pytest.fixture
def pacer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pacer]:
    """Pacing of this process's rank, which has memory of its own."""
    key = uuid.uuid4().hex[:16]
    page = StatusPage.create(key)
    rank = ranks.begin(DpsOptions(key=key), 0, torch.device("cpu"))
    rank.arena.add("layer", torch.zeros(1 << 20, dtype=torch.uint8))
    rank.build_region(
        plan_geometry(
            kv_bytes=4 << 20, residual_bytes=1 << 20, block_bytes=1 << 16,
            granularity_bytes=rank.arena.driver.granularity_bytes, unit_bytes=None,
        )
    )  # fmt: skip
    assert rank.memory is not None
    monkeypatch.setattr(our_worker, "redirect", lambda runner, moves: None)
    # No stall of the test may be taken for a rest.
    monkeypatch.setattr(rank.memory._pacer, "_idle_after_s", 3600.0)
    yield rank.memory._pacer
    ranks.end()
    page.remove()


def run_step(monkeypatch: pytest.MonkeyPatch, tokens: int, during: Any = lambda: None) -> None:
    monkeypatch.setattr(cpu_worker.CPUWorker, "execute_model", lambda self, output: during())
    step = SimpleNamespace(dps=StepCommand(Mode.FAST), total_num_scheduled_tokens=tokens)
    Worker().execute_model(step)


def test_restore_has_the_whole_link_again_from_the_first_step_without_tokens(
    pacer: Pacer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pacer.piece_bytes(CHUNK_BYTES) == CHUNK_BYTES
    run_step(monkeypatch, tokens=3)
    assert pacer.piece_bytes(CHUNK_BYTES) < CHUNK_BYTES
    run_step(monkeypatch, tokens=0)
    assert pacer.piece_bytes(CHUNK_BYTES) == CHUNK_BYTES


def test_restore_is_held_down_while_the_first_step_after_a_rest_runs(
    pacer: Pacer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    run_step(monkeypatch, tokens=0)
    run_step(monkeypatch, 3, lambda: pieces.append(pacer.piece_bytes(CHUNK_BYTES)))
    assert pieces[0] < CHUNK_BYTES


def test_quick_steps_are_all_counted_and_teach_the_pacing_once_a_period_unless_it_restores(
    pacer: Pacer, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(pacer, "note_step", lambda *step: noted.append(step))
    monkeypatch.setattr(our_worker, "NOTE_PERIOD_S", 1e6)
    monkeypatch.setattr(cpu_worker.CPUWorker, "execute_model", lambda self, output: None)
    step = SimpleNamespace(dps=StepCommand(Mode.FAST), total_num_scheduled_tokens=3)
    idle = SimpleNamespace(dps=StepCommand(Mode.FAST), total_num_scheduled_tokens=0)
    worker = Worker()
    for output in (step, step, step):
        worker.execute_model(output)
    assert len(noted) == 1
    for output in (idle, step, step):
        worker.execute_model(output)
    assert len(noted) == 3
    rank = ranks.current()
    monkeypatch.setattr(type(rank), "restoring", property(lambda self: True))
    worker.execute_model(step)
    assert len(noted) == 4
    assert rank._section["fast_steps"] == 6
