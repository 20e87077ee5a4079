"""Engines in processes of their own: turns, failures, and one real engine from end to end."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from dps_ray.bench.engines.turns import EngineProcess, in_turns
from dps_ray.checks.specs import EngineSpec
from dps_ray.cli.main import main
from dps_ray.config import DpsConfigError
from dps_ray.models.named import model_folder


def test_everybody_has_one_turn_a_round_and_the_order_changes() -> None:
    turns = list(in_turns(["a", "b", "c"], 3))
    assert Counter(turns) == Counter((number, name) for number in range(3) for name in "abc")
    assert [name for _, name in turns[::3]] == ["a", "b", "c"]


def test_an_engine_that_dies_is_reported_by_its_label(tmp_path: Path) -> None:
    spec = EngineSpec("lost", str(tmp_path), kv_bytes=1 << 20)
    with EngineProcess(spec, threads=1) as process:
        process._process.kill()
        with pytest.raises(RuntimeError, match="engine 'lost' has ended"):
            process.wait_until_ready()


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        DpsConfigError, match="model is 'tinny:x': choose one of smollm2, tiny:qwen3"
    ):
        model_folder("tinny:x", "float16", tmp_path)


@pytest.mark.engine
def test_a_burst_on_equal_memory_runs_dps_in_fast_mode_and_back_and_leaves_no_process(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--model", "tiny:qwen3", "--dtype", "bfloat16", "--root", str(tmp_path)]
    load = ["--requests", "12", "--prompt-tokens", "60", "90", "--output-tokens", "60", "80"]
    memory = ["--kv-mb", "1.6", "--free-kv-mb", "4.7", "--rounds", "1", "--threads", "1"]
    before = _children()
    main(["bench", "pressure", *words, *load, *memory, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["checks"]["DPS returned to full mode after every burst"]
    assert report["fast_share"] > 0
    assert report["preemptions"]["plain"] > report["preemptions"]["dps"]
    assert report["kv_peak_mb"]["dps"] > 1.6 >= report["kv_peak_mb"]["plain"]
    deadline_s = time.monotonic() + 60.0
    while left := _children() - before:
        assert time.monotonic() < deadline_s, f"processes {left} were left behind"
        time.sleep(0.05)


def _children() -> set[int]:
    me = os.getpid()
    return {int(pid) for pid in filter(str.isdecimal, os.listdir("/proc")) if _parent(pid) == me}


def _parent(pid: str) -> int | None:
    try:
        return int(Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None
