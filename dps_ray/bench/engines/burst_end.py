"""What ``dps-ray bench memory`` asks of a live engine: from the end of a burst to full mode."""

import time
from typing import Any

from dps_ray.bench.paper_rule import ThrottledPacer
from dps_ray.checks.engine import Engine
from dps_ray.engine import rank as ranks
from dps_ray.engine.idle import POLL_S
from dps_ray.engine.restore_reporter import RestoreReporter
from dps_ray.memory.manager import MemoryManager
from dps_ray.modes import Mode

_LIMIT_S = 60.0


def burst_end(
    engine: Engine,
    *,
    residents: list[list[int]],
    fillers: list[list[int]],
    steps_decoding: int,
    paper: bool,
) -> dict[str, Any]:
    """A burst that lends memory and is cut off, and the first full step after it.

    Parameters
    ----------
    residents
        Prompts of requests that go on meanwhile, in base memory; none for an idle replica.
    fillers
        Prompts of the burst, which ends for all of them at once.
    steps_decoding
        Steps that the whole burst decodes before it ends.
    paper
        Restore by the paper's throttled chunks from now on.
    """
    if paper:
        _restore_throttled()
    engine.return_to_full()
    steady_ms: list[float] = []
    kept = engine.start(residents, engine.spec.max_model_len - 256)
    engine.prefill()
    if residents:
        steady_ms = [_timed_step_ms(engine) for _ in range(20)]
    burst = engine.start(fillers, 128)
    engine.prefill()
    for _ in range(steps_decoding):
        engine.step()
    lent = engine.status.units_kv
    engine.llm.llm_engine.abort_request(burst)
    began_s = time.perf_counter()
    steps_ms: list[float] = []
    while engine.scheduler.mode is Mode.FAST and time.perf_counter() - began_s < _LIMIT_S:
        steps_ms.append(_timed_step_ms(engine))
        if not residents:
            # The pause of an idle engine's own loop.
            time.sleep(POLL_S)
    return_s = time.perf_counter() - began_s
    engine.llm.llm_engine.abort_request(kept)
    engine.step()
    return {
        "return_s": return_s,
        "units_lent": lent,
        "steady_ms": steady_ms,
        "steps_ms": steps_ms if residents else [],
        "returned": engine.scheduler.mode is Mode.FULL,
    }


def _timed_step_ms(engine: Engine) -> float:
    began_s = time.perf_counter()
    engine.step()
    return (time.perf_counter() - began_s) * 1e3


def _restore_throttled() -> None:
    """Give this process's rank a restore thread that the paper's rule paces."""
    rank = ranks.current()
    memory = rank.memory
    assert memory is not None
    if isinstance(memory._pacer, ThrottledPacer):
        return
    memory._worker.stop()
    rank.memory = MemoryManager(
        memory.region,
        pacer=ThrottledPacer(),
        chunk_bytes=rank.options.restore_chunk_bytes,
        verify=rank.options.verify_restore,
        on_done=RestoreReporter(rank.index, rank._section),
    )
