"""Requests that insist on full precision: which may run, which wait, which end."""

from types import SimpleNamespace
from typing import Any

import pytest

from dps_ray.engine.floors import GAVE_UP, FullRequests, TokenOrigins
from dps_ray.modes import Mode

LIMIT_TOKENS = 100


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str, prompt_tokens: int = 10, max_tokens: int = 20, **extra: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        sampling_params=SimpleNamespace(extra_args=extra or None),
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def full(clock: Clock) -> FullRequests:
    return FullRequests(LIMIT_TOKENS, clock)


def test_only_requests_that_insist_are_kept_out_of_fast_steps(full: FullRequests) -> None:
    assert full.admit(request("any"))
    assert full.admit(request("prefers", dps_precision="prefer-full"))
    assert full.admit(request("insists", dps_precision="full"))
    assert len(full) == 1
    assert full.barred(Mode.FAST) == {"insists"}
    assert full.barred(Mode.FULL) == set()


def test_output_is_cut_to_what_the_base_blocks_hold(full: FullRequests) -> None:
    long = request("long", prompt_tokens=90, max_tokens=50, dps_precision="full")
    assert full.admit(long)
    assert long.max_tokens == 10


def test_prompt_that_fills_the_base_blocks_never_runs_and_keeps_nobody_from_lending(
    full: FullRequests,
) -> None:
    assert not full.admit(request("large", prompt_tokens=LIMIT_TOKENS, dps_precision="full"))
    assert len(full) == 0
    assert full.barred(Mode.FULL) == {"large"}
    full.remove("large")
    assert full.barred(Mode.FAST) == set()


def test_request_gives_up_when_its_wait_is_over_in_fast_mode_only(
    full: FullRequests, clock: Clock
) -> None:
    full.admit(request("short", dps_precision="full", dps_wait_s=2.0))
    full.admit(request("long", dps_precision="full", dps_wait_s=9.0))
    full.admit(request("patient", dps_precision="full"))
    clock.now_s += 1.9
    assert full.give_up(Mode.FAST) == []
    clock.now_s += 1.1
    assert full.give_up(Mode.FULL) == []
    assert full.give_up(Mode.FAST) == ["short"]
    assert full.give_up(Mode.FAST) == []
    assert full.gave_up() == {"short": pytest.approx(3.0)}
    assert len(full) == 2
    assert full.barred(Mode.FULL) == {"short"}
    clock.now_s += 1e6
    assert full.give_up(Mode.FAST) == ["long"]


def test_request_that_has_been_computed_does_not_give_up(full: FullRequests, clock: Clock) -> None:
    full.admit(request("runs", dps_precision="full", dps_wait_s=2.0))
    full.started({"runs": 10, "other": 3})
    clock.now_s += 100.0
    assert full.give_up(Mode.FAST) == []


def test_request_that_ends_is_forgotten(full: FullRequests, clock: Clock) -> None:
    full.admit(request("left", dps_precision="full", dps_wait_s=2.0))
    full.remove("left")
    clock.now_s += 100.0
    assert full.give_up(Mode.FAST) == []
    assert len(full) == 0


def test_last_output_tells_who_made_the_tokens_and_who_waited_in_vain() -> None:
    def output(name: str, tokens: int, *, ends: bool) -> Any:
        return SimpleNamespace(
            request_id=name,
            new_token_ids=[1] * tokens,
            finish_reason="stop" if ends else None,
            kv_transfer_params=None,
        )

    origins = TokenOrigins()
    origins.credit([output("a", 2, ends=False)], Mode.FULL, {})
    last, late = output("a", 1, ends=True), output("b", 0, ends=True)
    origins.credit([last, late], Mode.FAST, {"b": 2.5})
    assert last.kv_transfer_params == {"dps_tokens_full": 2, "dps_tokens_fast": 1}
    assert late.kv_transfer_params == {"dps_tokens_full": 0, "dps_tokens_fast": 0, GAVE_UP: 2.5}
