"""Runs engines one after the other in a process of their own, in the process's main thread.

vLLM keeps process-wide state, and a crash must not take the check with it: every group of engines
gets a fresh interpreter, and its results come back as JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dps_ray.checks.specs import EngineSpec
from dps_ray.config import DpsConfigError


def run_engines(specs: Sequence[EngineSpec], timeout_s: float = 600.0) -> list[dict[str, Any]]:
    """Results of each spec's scenario, in order.

    Raises
    ------
    DpsConfigError
        When an engine refuses its configuration; the message is the engine's own.
    RuntimeError
        When the process fails otherwise; the message ends with what it last printed.
    """
    environment = {
        **engine_environment(threads=1),
        "VLLM_CPU_OMP_THREADS_BIND": _threads(specs),
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    }
    if not any(spec.compiled for spec in specs):
        # Even eager engines have vLLM compile a small operator on logprobs: a minute for nothing.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    with tempfile.TemporaryDirectory(prefix="dps-check-") as folder:
        request, response = Path(folder, "request.json"), Path(folder, "response.json")
        request.write_text(json.dumps([spec.as_dict() for spec in specs]))
        done = subprocess.run(
            [sys.executable, "-m", "dps_ray.checks.process", str(request), str(response)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        answer = json.loads(response.read_text()) if response.exists() else {}
    if "refused" in answer:
        raise DpsConfigError(answer["refused"])
    if done.returncode or "results" not in answer:
        labels = ", ".join(spec.label for spec in specs)
        raise RuntimeError(f"engines {labels} failed ({done.returncode}): {done.stderr[-4000:]}")
    results: list[dict[str, Any]] = answer["results"]
    return results


def engine_environment(threads: int) -> dict[str, str]:
    """Environment of a process with an engine and its scheduler in its main thread, offline."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _threads(specs: Sequence[EngineSpec]) -> str:
    """One core a rank where the machine has them, else no binding."""
    ranks = max(spec.tensor_parallel_size for spec in specs)
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1 or ranks > len(cores):
        return "nobind"
    return "|".join(str(core) for core in cores[:ranks])


def _main(request: str, response: str) -> None:
    from dps_ray.checks.engine import engine
    from dps_ray.checks.scenarios import SCENARIOS

    specs = [EngineSpec.from_dict(raw) for raw in json.loads(Path(request).read_text())]
    results = []
    try:
        for spec in specs:
            with engine(spec) as running:
                results.append(SCENARIOS[spec.scenario](running, **spec.arguments))
    except DpsConfigError as error:
        Path(response).write_text(json.dumps({"refused": str(error)}))
        return
    Path(response).write_text(json.dumps({"results": results}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
