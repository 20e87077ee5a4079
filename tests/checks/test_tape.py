"""A tape played again on static memory: it is the same, and any difference is noticed."""

from pathlib import Path

from dps_ray.checks.features_check import check_features
from dps_ray.checks.process import run_engines
from dps_ray.models.tiny import make_tiny


def test_a_replay_is_the_same_and_notices_one_wrong_mode_and_one_wrong_block(
    tmp_path: Path,
) -> None:
    recorded, again = check_features(make_tiny("qwen3", tmp_path, dtype="float16"), tmp_path)[
        0
    ].specs
    recorded.arguments.update(waves=1, per_wave=8)
    run, played = run_engines([recorded, again])
    assert run["units_lent"] > 0 < run["blocks_moved"]
    assert played["steps"] > 0
    assert played["different"] == []
    assert played["noticed"] == {
        "a step in the other mode": True,
        "a KV block with other signs": True,
    }
