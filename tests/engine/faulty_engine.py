"""Breaks one rank of a real engine in several ways, and prints what it does as JSON.

Run in a process of its own, as all engines of the tests: ``faulty_engine.py MODEL BINDING``.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dps_ray.checks.engine import Engine, engine
from dps_ray.checks.scenarios import prompts
from dps_ray.checks.specs import EngineSpec
from dps_ray.config import DpsConfigError
from dps_ray.engine import rank as ranks
from dps_ray.engine.metrics import StatusCollector
from dps_ray.memory.driver import VmmError
from dps_ray.memory.host_driver import HostDriver, HostExecutor
from dps_ray.modes import Mode
from dps_ray.scheduling.retry import RetryLimits

KV_BYTES = 2 << 20
ATTEMPTS = 5


class Breaker:
    """Faults at the seam of the driver; ``left`` counts how many more calls go wrong."""

    def __init__(self) -> None:
        self.fault, self.left = "", 0
        copy_summed, map_handle = HostExecutor.copy_summed, HostDriver.map

        def broken_copy(
            executor: Any, destination: torch.Tensor, source: torch.Tensor, first_row: int
        ) -> int | None:
            if self.hits("copy refused"):
                raise VmmError("copy", f"{source.numel()} bytes", "injected: link down")
            if self.hits("copy damaged"):
                source = source.clone()
                source[-1] ^= 1
            return copy_summed(executor, destination, source, first_row)

        def broken_map(driver: Any, address: int, handle: Any) -> None:
            if self.hits("map refused"):
                raise VmmError("map", f"{handle.nbytes} bytes", "injected: no map")
            map_handle(driver, address, handle)

        HostExecutor.copy_summed = broken_copy  # type: ignore[method-assign]
        HostDriver.map = broken_map  # type: ignore[method-assign]

    def hits(self, fault: str) -> bool:
        if self.fault != fault or not self.left:
            return False
        self.left -= 1
        return True


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def metrics(running: Engine) -> dict[str, float]:
    key = running.llm.llm_engine.vllm_config.additional_config["dps"]["key"]
    return {family.name: family.samples[0].value for family in StatusCollector(key, "0").collect()}


def ask(running: Engine) -> list[list[int]]:
    outputs = running.finish(names := running.start(prompts(2, 30, 30, seed=3), 12))
    return [list(outputs[name].outputs[0].token_ids) for name in names]


def pin(running: Engine, value: str) -> None:
    running.llm.collective_rpc("dps_set_pin", args=(value,))


def burst(running: Engine) -> None:
    running.finish(running.start(prompts(12, 160, 160), 40))


def step_until(running: Engine, condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Step in a bound of time, since an idle engine steps far faster than its retries pause."""
    give_up_at_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_at_s:
        if condition():
            return True
        running.step()
    return False


def live_through(running: Engine, breaker: Breaker, fault: str, times: int) -> dict[str, Any]:
    """A burst, a way back that breaks ``times`` times, and what becomes of the replica."""
    manager, lines = running.scheduler.sum_manager, Lines()
    logging.getLogger("vllm.dps").addHandler(lines)
    lent, failed = manager.counters.units_lent, manager.counters.restores_failed
    pin(running, "fast")
    burst(running)
    breaker.fault, breaker.left = fault, times
    pin(running, "auto")
    ended = step_until(running, lambda: manager.gave_up or running.scheduler.mode is Mode.FULL)
    seen = metrics(running)
    found = {
        "lent": manager.counters.units_lent - lent,
        "ended": ended,
        "mode": str(running.scheduler.mode),
        "fault": manager.fault,
        "metrics": {name: seen[name] for name in ("dps:fault", "dps:mode_fast")},
        "failed": manager.counters.restores_failed - failed,
        "tokens": ask(running),
        "logged": list(lines.said),
    }
    breaker.left = 0
    pin(running, "fast")
    running.step()
    pin(running, "auto")
    found["recovered"] = running.return_to_full()
    found["fault_after"] = manager.fault
    found["intact"] = [rank["residual_intact"] for rank in running.verify_ranks()]
    found["tokens_after"] = ask(running)
    logging.getLogger("vllm.dps").removeHandler(lines)
    return found


def refused_reload(running: Engine) -> str:
    try:
        running.llm.collective_rpc("reload_weights")
    except DpsConfigError as refusal:
        return str(refusal)
    return ""


def main(model: str, binding: str) -> None:
    breaker = Breaker()
    options = {"binding": binding, "min_fast_dwell_s": 0.0, "trend_horizon_s": 0.0,
               "kernel": "exact", "unit_bytes": 65536}  # fmt: skip
    spec = EngineSpec("faulty", model, KV_BYTES, dps=options, enable_prefix_caching=False)
    with engine(spec) as running:
        manager = running.scheduler.sum_manager
        manager._return.retry._limits = RetryLimits(attempts=ATTEMPTS, first_pause_s=0.01)
        result: dict[str, Any] = {"full": ask(running)}
        pin(running, "fast")
        result["fast"] = ask(running)
        pin(running, "auto")
        assert running.return_to_full()
        result["reload_refused"] = refused_reload(running)
        result["after_reload"] = ask(running)
        faults = ["copy damaged", "copy refused"] + ["map refused"] * (binding == "any")
        for fault in faults:
            result[f"{fault}, for good"] = live_through(running, breaker, fault, 1 << 30)
            result[f"{fault}, twice"] = live_through(running, breaker, fault, 2)
        memory = ranks.current().memory
        assert memory is not None
        backup = memory.region.backup.segment(1)
        backup[100] ^= 1
        result["backup damaged"] = live_through(running, breaker, "", 0)
        backup[100] ^= 1
        pin(running, "fast")
        running.step()
        pin(running, "auto")
        result["mended"] = running.return_to_full()
        seen = metrics(running)
        result["restores_failed"] = seen["dps:restores_failed"]
        result["restore_bytes_per_s"] = seen["dps:restore_bytes_per_s"]
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
