"""A rank whose memory breaks: the replica stays correct, says so once, recovers where it can."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.engine]

SCRIPT = Path(__file__).with_name("faulty_engine.py")
ATTEMPTS = 5


@pytest.fixture(scope="module")
def lived() -> dict[str, Any]:
    """What one engine did under every fault, with segments that move between units."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(make_tiny("qwen3", cache_root())), "any"],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("copy damaged, for good", "differs from the backup"),
        ("copy refused, for good", "injected: link down"),
        ("map refused, for good", "injected: no map"),
        ("backup damaged", "differs from the backup"),
    ],
)
def test_what_stays_broken_keeps_the_replica_in_fast_mode_with_right_answers(
    lived: dict[str, Any], fault: str, said: str
) -> None:
    found = lived[fault]
    assert found["ended"]
    assert found["lent"] > 0
    assert found["mode"] == "fast"
    assert "gave up after 5 attempts" in found["fault"]
    assert said in found["fault"], "the page and the log name the cause"
    assert found["metrics"] == {"dps:fault": 1.0, "dps:mode_fast": 1.0}
    assert found["failed"] >= ATTEMPTS
    assert found["tokens"] == lived["fast"]
    broke, gave_up = found["logged"]
    assert said in broke
    assert "the replica stays in fast mode" in gave_up


@pytest.mark.parametrize(
    "fault", ["copy damaged, for good", "copy refused, for good", "map refused, for good"]
)
def test_what_has_been_mended_is_taken_up_again_when_the_pin_changes(
    lived: dict[str, Any], fault: str
) -> None:
    found = lived[fault]
    assert found["recovered"]
    assert found["fault_after"] is None
    assert found["intact"] == [True]
    assert found["tokens_after"] == lived["full"]


@pytest.mark.parametrize(
    "fault", ["copy damaged, twice", "copy refused, twice", "map refused, twice"]
)
def test_a_passing_fault_is_outlived_without_an_operator(lived: dict[str, Any], fault: str) -> None:
    found = lived[fault]
    assert found["lent"] > 0
    assert found["mode"] == "full"
    assert found["fault"] is None
    assert found["metrics"] == {"dps:fault": 0.0, "dps:mode_fast": 0.0}
    assert found["failed"] >= 1
    assert len(found["logged"]) == 1
    assert found["tokens"] == lived["full"]
    assert found["intact"] == [True]


def test_a_backup_that_stays_damaged_is_never_taken_for_the_model(lived: dict[str, Any]) -> None:
    found = lived["backup damaged"]
    assert not found["recovered"]
    assert found["tokens_after"] == lived["fast"]
    assert lived["mended"]


def test_every_failed_restore_is_counted(lived: dict[str, Any]) -> None:
    counted = sum(found["failed"] for found in lived.values() if isinstance(found, dict))
    assert lived["restores_failed"] >= counted


def test_speed_of_the_latest_restores_is_exported(lived: dict[str, Any]) -> None:
    # A unit of 64 KiB in a minute: the process may have stood still meanwhile.
    assert lived["restore_bytes_per_s"] > 1e3


def test_reload_of_the_weights_is_refused_and_leaves_the_engine_as_it_was(
    lived: dict[str, Any],
) -> None:
    assert "start a replica of the new checkpoint instead" in lived["reload_refused"]
    assert lived["after_reload"] == lived["full"]
