"""A tape played again on static memory: it is the same, and any difference is noticed."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dps_ray.checks.features_check import check_features
from dps_ray.checks.process import run_engines
from dps_ray.checks.tape import Step, replay
from dps_ray.commands import StepCommand
from dps_ray.models.tiny import make_tiny
from dps_ray.modes import Mode


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


class Drifting:
    """An executor that never answers as the tape says, and notes what it is told to end."""

    def __init__(self) -> None:
        self.ended: list[set[str]] = []

    def execute_model(self, orders: Any) -> None:
        self.ended.append(orders.finished_req_ids)

    def sample_tokens(self, grammar: Any) -> Any:
        return SimpleNamespace(
            logprobs=None, req_ids=["one"], sampled_token_ids=[[1]], num_nans_in_logits=None
        )


def test_a_difference_ahead_of_the_deliberate_one_is_not_taken_for_its_effect(
    tmp_path: Path,
) -> None:
    new = SimpleNamespace(req_id="one", block_ids=([4],))
    orders = [
        SimpleNamespace(
            dps=StepCommand(Mode.FAST),
            scheduled_new_reqs=[] if number else [new],
            num_scheduled_tokens={"one": 1},
            finished_req_ids=set(),
        )
        for number in range(3)
    ]
    tape = tmp_path / "tape"
    tape.write_bytes(
        pickle.dumps([Step(pickle.dumps(each), pickle.dumps(None)) for each in orders])
    )
    executor = Drifting()
    engine = SimpleNamespace(
        core=SimpleNamespace(model_executor=executor), status=SimpleNamespace(total_blocks=8)
    )
    played = replay(engine, tape=str(tape), controls=True)  # type: ignore[arg-type]
    assert played["different"] == [0, 1, 2]
    assert set(played["noticed"].values()) == {False}
    assert executor.ended == [{"one"}, set(), set(), {"one"}, {"one"}]
