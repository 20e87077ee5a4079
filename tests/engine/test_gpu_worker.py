"""The GPU worker without a GPU: what it puts into vLLM's seams, and the order of a step."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.model_runner as runner_v2
import vllm.v1.worker.gpu_worker as stock_worker
from dps_kernels.hopper import arch, warm_up
from dps_kernels.hopper.arch import Arch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GpuRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GpuRunnerV1

from dps_ray.commands import StepCommand
from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.engine import elastic_worker
from dps_ray.engine import rank as ranks
from dps_ray.engine.gpu_runner_v2 import DpsGpuModelRunnerV2 as RunnerV2
from dps_ray.engine.gpu_runner_v2 import DpsGraphManager
from dps_ray.engine.gpu_worker import DpsGpuWorker, StepTimer
from dps_ray.engine.moe_cuda import DpsCudaMoEMethod
from dps_ray.engine.seams import swapped
from dps_ray.modes import Mode


class Worker(DpsGpuWorker):
    """A worker that was never given a device."""

    def __init__(self, log: list[Any]) -> None:
        self.model_runner = SimpleNamespace(capture_missed=lambda: log.append("capture"))
        self._timer = StepTimer()


class Event:
    """A CUDA event whose work ends when the test says so."""

    now_ms = 0.0
    ended = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = Event.now_ms
        Event.now_ms += 8.0

    def query(self) -> bool:
        return Event.ended

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.ended = False


@pytest.mark.parametrize("v2", [False, True])
def test_runner_stands_where_the_stock_worker_takes_its_own_from(v2: bool) -> None:
    worker = Worker([])
    worker.use_v2_model_runner = v2
    module, name, runner = worker._runner_seam()
    stock = getattr(module, name)
    assert issubclass(runner, stock)
    assert f"{module.__name__} import" in inspect.getsource(stock_worker.Worker.init_device)
    with swapped(module, name, runner):
        assert getattr(module, name) is runner
    assert getattr(module, name) is stock


def test_v2_runner_replaces_what_the_stock_one_calls_by_name() -> None:
    source = inspect.getsource(runner_v2.GPUModelRunner.initialize_kv_cache)
    assert "ModelCudaGraphManager(" in source
    assert issubclass(DpsGraphManager, runner_v2.ModelCudaGraphManager)
    ours = list(inspect.signature(RunnerV2._init_kv_cache).parameters)[1:]
    assert ours == list(inspect.signature(runner_v2.init_kv_cache).parameters)


def test_command_is_obeyed_before_anything_of_its_step_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []
    rank = SimpleNamespace(
        full_share=0.25,
        apply=log.append,
        begin_step=lambda: log.append("begin") or 4096,
        count_step=lambda *done: log.append(done),
        count_idle_step=lambda: log.append("idle"),
    )
    monkeypatch.setattr(ranks, "current", lambda: rank)
    monkeypatch.setattr(
        stock_worker.Worker, "execute_model", lambda self, output: log.append("launch")
    )
    worker, command = Worker(log), StepCommand(mode=Mode.FAST)
    step = SimpleNamespace(dps=command, total_num_scheduled_tokens=5)
    idle_step = SimpleNamespace(dps=command, total_num_scheduled_tokens=0)
    worker.execute_model(step)
    assert log == [command, "capture", "begin", "launch"]
    log.clear()
    worker.execute_model(idle_step)
    assert log == [command, "launch"], "not idle while a step still runs"
    Event.ended = True
    log.clear()
    worker.execute_model(idle_step)
    assert log == [command, (0.008, 5, 0.25, 4096), "idle", "launch"], (
        "the load's last step comes first"
    )
    log.clear()
    worker.execute_model(step)
    assert log == [command, "capture", "begin", "launch"]


@pytest.mark.parametrize(
    ("asked", "measured", "least"),
    [(None, 96 << 20, 64 << 20), (64 << 20, 64 << 20, 64 << 20), (None, 99 << 20, 64 << 20)],
    ids=["measured", "asked for", "another rank has less"],
)
def test_residual_takes_its_share_of_what_vllm_sized_by_itself(
    asked: int | None, measured: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that was asked for is that of the base blocks alone."""
    residual, block = 32 << 20, 1 << 20
    arena = SimpleNamespace(used_bytes=residual, driver=SimpleNamespace(granularity_bytes=2 << 20))
    rank = SimpleNamespace(arena=arena, options=DpsOptions())
    monkeypatch.setattr(ranks, "current", lambda: rank)
    monkeypatch.setattr(elastic_worker, "bytes_per_block", lambda config, spec: block)
    monkeypatch.setattr(stock_worker.Worker, "determine_available_memory", lambda self: measured)
    monkeypatch.setattr(elastic_worker, "get_tp_group", lambda: SimpleNamespace(cpu_group="tp"))
    monkeypatch.setattr(
        elastic_worker, "least_of_ranks", lambda nbytes, group: min(nbytes, {"tp": least}[group])
    )
    worker = Worker([])
    worker.vllm_config = None
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=asked)
    worker.model_runner = SimpleNamespace(get_kv_cache_spec=dict)
    assert worker.determine_available_memory() == 96 << 20
    geometry = worker.model_runner.dps_geometry
    assert (geometry.base_blocks, geometry.elastic_blocks) == (64, 32)


def test_steps_of_vllm_own_warm_up_carry_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(ranks, "current", lambda: SimpleNamespace(apply=log.append))
    monkeypatch.setattr(
        stock_worker.Worker, "execute_model", lambda self, output: log.append("launch")
    )
    Worker(log).execute_model(SimpleNamespace(total_num_scheduled_tokens=3))
    assert log == ["launch"]


class Experts(DpsCudaMoEMethod):
    """128 experts, of which a token takes 8."""

    def __init__(self, *, fused: bool) -> None:
        torch.nn.Module.__init__(self)
        self.moe = SimpleNamespace(num_local_experts=128, experts_per_token=8)
        self.fused = fused


@pytest.mark.parametrize("fused", [True, False], ids=["experts in the kernels", "rebuilt experts"])
def test_every_kernel_is_compiled_in_both_modes_before_vllm_warms_up(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []

    @contextmanager
    def capturing(mode: Mode) -> Iterator[None]:
        log.append(mode)
        yield

    h100 = Arch(90, 132, 228 << 10)
    rank = SimpleNamespace(fused=True, capturing=capturing, device=torch.device("cuda", 0))
    monkeypatch.setattr(ranks, "current", lambda: rank)
    monkeypatch.setattr(arch, "of_device", lambda device: h100)
    monkeypatch.setattr(
        stock_worker.Worker, "compile_or_warm_up_model", lambda self: log.append("stock")
    )
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    model[1].quant_method = Experts(fused=fused)
    worker = Worker([])
    worker.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=4000)
    )
    worker.model_runner = SimpleNamespace(
        get_model=lambda: model,
        _dummy_run=lambda tokens, is_profile: log.append(tokens),
    )
    worker.compile_or_warm_up_model()
    counts = warm_up.token_counts(4000, h100, {(128, 8)} if fused else ())
    assert (1024 in counts) is fused, "the last batch whose experts get 64 tokens each"
    assert log == [Mode.FULL, *counts, Mode.FAST, *counts, "stock"]


def test_nothing_is_compiled_where_weights_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    rank = SimpleNamespace(fused=False, capturing=lambda mode: nullcontext())
    monkeypatch.setattr(ranks, "current", lambda: rank)
    monkeypatch.setattr(
        stock_worker.Worker, "compile_or_warm_up_model", lambda self: log.append("stock")
    )
    Worker(log).compile_or_warm_up_model()
    assert log == ["stock"]


@pytest.mark.parametrize("runner", [GpuRunnerV1, GpuRunnerV2])
def test_runners_take_the_warm_up_batches_as_they_are_called(runner: type) -> None:
    inspect.signature(runner._dummy_run).bind(None, 17, is_profile=True)
    inspect.signature(runner.get_model).bind(None)


def test_step_that_still_runs_is_not_counted() -> None:
    timer = StepTimer()
    with timer.step(7, 1.0, 512):
        pass
    assert timer.finished() == []
    Event.ended = True
    assert timer.finished() == [(0.008, 7, 1.0, 512)]
    assert timer.finished() == []


@pytest.mark.parametrize(
    ("supported", "usable"), [(["LBHNC", "BLNHC", "BLHNC"], ["BLNHC", "BLHNC"]), (["LBHNC"], None)]
)
def test_only_block_outermost_layouts_are_offered(
    supported: list[str], usable: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        stock_worker.Worker, "get_supported_kv_cache_layouts", lambda self: supported
    )
    worker = Worker([])
    if usable is None:
        with pytest.raises(DpsConfigError, match=r"the KV cache layouts \['LBHNC'\]"):
            worker.get_supported_kv_cache_layouts()
    else:
        assert worker.get_supported_kv_cache_layouts() == usable
