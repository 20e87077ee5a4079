"""Pacing against a simulated replica: a clock, steps, and copies that slow the steps down."""

from dataclasses import dataclass

import pytest

from dps_ray.memory.pacing import Pacer

CHUNK_BYTES = 4 << 20
LINK_BYTES_PER_S = 5e9


@dataclass
class Replica:
    """Steps of ``step_s`` that stretch in proportion to the bytes copied meanwhile.

    Under copies at the full link rate steps take about ``1 + stretch`` times as long.
    """

    pacer: Pacer
    clock: list[float]
    step_s: float = 0.02
    stretch: float = 0.6
    copied: int = 0
    copy_at_s: float = 0.0
    """When the next piece may be copied: its delay has been asked for already."""
    piece: int = 64 << 10

    def step(self, *, restoring: bool, load: int = 8, full_share: float = 0.0) -> float:
        """Run one step with a restore thread beside it; return its duration, seconds."""
        start_s = self.clock[0]
        duration_s, copied = self.step_s, 0
        if restoring:
            self.copy_at_s = max(self.copy_at_s, start_s)
        while restoring and self.copy_at_s < start_s + duration_s:
            copy_s = self.piece / LINK_BYTES_PER_S
            copied += self.piece
            duration_s += self.stretch * copy_s
            self.clock[0] = self.copy_at_s + copy_s
            self.pacer.note_copy(self.piece, copy_s)
            self.piece = self.pacer.piece_bytes(CHUNK_BYTES)
            self.copy_at_s = self.clock[0] + self.pacer.next_delay_s(self.piece)
        self.clock[0] = start_s + duration_s
        self.copied += copied
        self.pacer.note_step(duration_s, copied > 0, load, full_share)
        return duration_s

    def run(self, steps: int, *, restoring: bool) -> None:
        for _ in range(steps):
            self.step(restoring=restoring)


def replica(stretch: float = 0.6, max_inflation: float = 0.05, floor: float = 64e6) -> Replica:
    clock = [100.0]
    pacer = Pacer(max_inflation=max_inflation, floor_bytes_per_s=floor, clock=lambda: clock[0])
    return Replica(pacer, clock, stretch=stretch)


def test_an_idle_replica_restores_without_delay() -> None:
    idle = replica()
    for _ in range(50):
        assert idle.pacer.next_delay_s(CHUNK_BYTES) == 0.0
        idle.clock[0] += CHUNK_BYTES / LINK_BYTES_PER_S
        idle.pacer.note_step(0.001, restoring=True, load=0)


def test_restore_under_load_starts_slowly_and_settles_below_what_is_allowed() -> None:
    busy = replica()
    busy.run(20, restoring=False)
    taken_s = [busy.step(restoring=True) for _ in range(300)]
    piece_s = busy.stretch * busy.piece / LINK_BYTES_PER_S
    first_s = sum(taken_s[:8]) / 8
    assert first_s < 1.05 * busy.step_s, "the first steps are stretched too much"
    assert max(taken_s[:8]) < 1.05 * busy.step_s + piece_s, "a step holds a piece too many"
    settled = sum(taken_s[100:]) / 200 / busy.step_s - 1
    assert 0.01 < settled < 0.05
    assert max(taken_s) < 1.1 * busy.step_s


def test_the_next_restore_begins_at_the_rate_that_was_good_for_the_last() -> None:
    busy = replica()
    busy.run(20, restoring=False)
    busy.run(100, restoring=True)
    rate = busy.pacer.rate_bytes_per_s
    busy.run(50, restoring=False)
    busy.clock[0] += 60.0
    busy.step(restoring=True)
    assert busy.pacer.rate_bytes_per_s == rate


def test_one_slow_step_in_a_few_does_not_slow_the_restore() -> None:
    busy = replica()
    busy.run(20, restoring=False)
    busy.run(100, restoring=True)
    rate = busy.pacer.rate_bytes_per_s
    assert rate is not None
    for index in range(64):
        busy.step_s = 0.04 if index % 5 == 0 else 0.02
        busy.step(restoring=True)
    assert busy.pacer.rate_bytes_per_s == pytest.approx(rate, rel=0.3)


def test_a_sudden_stretch_is_met_before_a_judgement_is_due() -> None:
    busy = replica(stretch=0.05)
    busy.run(20, restoring=False)
    busy.run(100, restoring=True)
    rate = busy.pacer.rate_bytes_per_s or LINK_BYTES_PER_S
    busy.stretch = 1.0
    busy.run(3, restoring=True)
    assert (busy.pacer.rate_bytes_per_s or LINK_BYTES_PER_S) <= 0.5 * rate


def test_a_restore_that_disturbs_nobody_runs_at_link_rate() -> None:
    busy = replica(stretch=0.01)
    busy.run(20, restoring=False)
    busy.run(50, restoring=True)
    start_s, copied = busy.clock[0], busy.copied
    busy.run(100, restoring=True)
    rate = (busy.copied - copied) / (busy.clock[0] - start_s)
    assert rate > 0.9 * LINK_BYTES_PER_S
    assert busy.pacer.rate_bytes_per_s is None


def test_the_rate_never_falls_below_the_floor() -> None:
    floor = 500e6
    busy = replica(stretch=0.9, floor=floor)
    busy.run(20, restoring=False)
    busy.run(100, restoring=True)
    assert busy.pacer.rate_bytes_per_s == floor
    busy.pacer.next_delay_s(CHUNK_BYTES)
    assert busy.pacer.next_delay_s(CHUNK_BYTES) == pytest.approx(CHUNK_BYTES / floor)


def test_a_rate_held_down_recovers_to_the_links_own_once_copying_disturbs_nobody() -> None:
    busy = replica()
    busy.run(20, restoring=False)
    busy.run(20, restoring=True)
    assert busy.pacer.rate_bytes_per_s is not None
    busy.stretch = 0.0
    busy.run(200, restoring=True)
    assert busy.pacer.rate_bytes_per_s is None, "the link was not measured while held down"


def test_a_cap_holds_for_an_idle_replica_too() -> None:
    cap = 100e6
    pacer = Pacer(
        max_inflation=0.05, floor_bytes_per_s=64e6, cap_bytes_per_s=cap, clock=lambda: 0.0
    )
    pacer.next_delay_s(CHUNK_BYTES)
    assert pacer.next_delay_s(CHUNK_BYTES) == pytest.approx(CHUNK_BYTES / cap)


def test_a_cap_holds_for_what_steps_copy_too() -> None:
    cap = 30e6
    pacer = Pacer(max_inflation=0.05, floor_bytes_per_s=20e6, cap_bytes_per_s=cap)
    copied = 0
    for _ in range(1000):
        pacer.note_step(0.02, restoring=copied > 0, load=8)
        nbytes = pacer.slice_bytes
        pacer.note_slice(nbytes, nbytes / LINK_BYTES_PER_S)
        copied += nbytes
    assert copied == pytest.approx(1000 * 0.02 * cap, rel=0.1)


def test_a_paced_restore_runs_freely_once_the_load_has_gone() -> None:
    busy = replica()
    busy.run(20, restoring=False)
    busy.run(50, restoring=True)
    busy.pacer.next_delay_s(CHUNK_BYTES)
    assert busy.pacer.next_delay_s(CHUNK_BYTES) > 0
    busy.clock[0] += 2.0
    assert busy.pacer.next_delay_s(CHUNK_BYTES) == 0.0
    assert busy.pacer.next_delay_s(CHUNK_BYTES) == 0.0


def test_the_first_step_after_a_rest_is_paced_from_its_start() -> None:
    busy = replica()
    busy.run(20, restoring=False)
    busy.run(50, restoring=True)
    busy.pacer.note_step(0.0, restoring=False, load=0)
    assert busy.pacer.next_delay_s(CHUNK_BYTES) == 0.0
    busy.pacer.begin_step()
    busy.pacer.next_delay_s(CHUNK_BYTES)
    assert busy.pacer.next_delay_s(CHUNK_BYTES) > 0


def test_larger_steps_are_not_taken_for_inflation() -> None:
    busy = replica(stretch=0.0)
    for _ in range(20):
        busy.step(restoring=False, load=8)
    busy.step_s = 0.2
    for _ in range(20):
        busy.step(restoring=False, load=2000)
    for _ in range(60):
        busy.step(restoring=True, load=2000)
    assert busy.pacer.rate_bytes_per_s is None


def test_cancelled_waits_do_not_add_up() -> None:
    busy = replica(floor=1e6)
    busy.run(20, restoring=False)
    busy.run(50, restoring=True)
    rate = busy.pacer.rate_bytes_per_s
    assert rate is not None
    for _ in range(100):
        assert busy.pacer.next_delay_s(CHUNK_BYTES) <= CHUNK_BYTES / rate * 1.001


def test_a_paced_restore_copies_several_pieces_a_step_and_an_idle_one_whole_chunks() -> None:
    busy = replica()
    assert busy.pacer.piece_bytes(CHUNK_BYTES) == CHUNK_BYTES
    busy.run(20, restoring=False)
    busy.run(50, restoring=True)
    rate, piece = busy.pacer.rate_bytes_per_s, busy.pacer.piece_bytes(CHUNK_BYTES)
    assert rate is not None
    assert 1.75 <= rate * busy.step_s / piece < 3
    assert busy.pacer.piece_bytes(4096) == 4096, "too small to be split"
    busy.clock[0] += 2.0
    assert busy.pacer.piece_bytes(CHUNK_BYTES) == CHUNK_BYTES


@pytest.mark.parametrize("told", [True, False])
def test_what_returned_layers_cost_is_not_taken_for_the_restores_doing(told: bool) -> None:
    busy = replica(stretch=0.1)

    def steps(count: int, full_share: float, restoring: bool) -> None:
        busy.step_s = 0.02 + 0.01 * full_share
        for _ in range(count):
            busy.step(restoring=restoring, full_share=full_share if told else 0.0)

    if told:
        steps(20, 1.0, restoring=False)
    steps(40, 0.0, restoring=False)
    steps(40, 0.0, restoring=True)
    before = busy.pacer.rate_bytes_per_s or LINK_BYTES_PER_S
    for tenth in range(10):
        steps(10, tenth / 10, restoring=True)
    after = busy.pacer.rate_bytes_per_s or LINK_BYTES_PER_S
    assert (after > 0.5 * before) is told


def test_a_pass_much_longer_than_those_before_it_is_no_rest() -> None:
    clock = [100.0]
    pacer = Pacer(max_inflation=0.05, floor_bytes_per_s=1e6, clock=lambda: clock[0])
    pacer.begin_step()
    clock[0] += 0.02
    pacer.note_step(0.02, False, 8)
    pacer.begin_step()
    for _ in range(10):
        clock[0] += 1.0
        assert pacer.busy_left_s >= 1.0
    pacer.note_step(10.0, False, 4096)
    clock[0] += 20.0
    assert pacer.busy_left_s == 0.0
    pacer.begin_step()
    pacer.note_step(0.0, False, 0)
    assert pacer.busy_left_s == 0.0
