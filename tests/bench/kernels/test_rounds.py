"""Interleaved timing measures ratios that drift of the machine leaves alone."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.bench.kernels.rounds import Contender, Pace, fastest, interleave, ratio, spread

EXACT = Pace(max_rounds=9, row_s=1e9, turn_s=0.0)


class Machine:
    """A clock that calls advance, slower and slower as time passes."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now_s = 0.0
        self.slowdown = 1.0
        self.drift = drift
        self.log: list[tuple[str, int]] = []

    def kernel(self, name: str, cost_s: float) -> Callable[[int], None]:
        def call(copy: int) -> None:
            self.log.append((name, copy))
            self.now_s += cost_s * self.slowdown
            self.slowdown *= 1.0 + self.drift

        return call

    def clock(self) -> float:
        return self.now_s


def times_of(machine: Machine, pace: Pace, **costs_s: float) -> dict[str, list[float]]:
    contenders = {
        name: Contender(machine.kernel(name, cost_s), copies=3) for name, cost_s in costs_s.items()
    }
    return interleave(contenders, pace, machine.clock)


def test_a_machine_that_slows_down_threefold_leaves_the_ratio_of_two_kernels() -> None:
    machine = Machine(drift=0.03)
    times = times_of(machine, EXACT, slow=0.2, quick=0.1)
    assert max(times["quick"]) > 1.5 * min(times["quick"])
    assert ratio(times["slow"], times["quick"]).median == pytest.approx(2.0, rel=0.05)


def test_every_contender_takes_one_turn_in_every_round() -> None:
    machine = Machine()
    times_of(machine, EXACT, a=1.0, b=1.0, c=1.0)
    measured = [name for name, _ in machine.log][-27:]
    assert all(set(measured[i : i + 3]) == {"a", "b", "c"} for i in range(0, 27, 3))


def test_the_order_of_turns_changes_from_round_to_round() -> None:
    machine = Machine()
    times_of(machine, EXACT, a=1.0, b=1.0, c=1.0)
    first = [name for name, _ in machine.log][-27::3]
    assert first[:3] == ["a", "b", "c"]


def test_successive_calls_go_round_all_copies_of_the_operand() -> None:
    machine = Machine()
    times_of(machine, EXACT, a=1.0)
    copies = [copy for _, copy in machine.log]
    assert copies == [i % 3 for i in range(len(copies))]


def test_quick_calls_are_repeated_until_a_turn_is_long_enough_to_time() -> None:
    machine = Machine()
    times = times_of(machine, Pace(max_rounds=5, row_s=1e9, turn_s=1.0), quick=0.01, slow=2.0)
    names = [name for name, _ in machine.log]
    assert names.count("quick") > 50 * names.count("slow")
    assert times["quick"] == pytest.approx([0.01] * 5)


def test_slow_rows_end_after_the_fewest_rounds_that_give_quartiles() -> None:
    assert len(times_of(Machine(), Pace(min_rounds=5, row_s=1.0), slow=60.0)["slow"]) == 5


def test_the_clock_is_read_only_after_the_device_has_finished() -> None:
    machine, pending = Machine(), [0.0]

    def launch(copy: int) -> None:
        pending[0] += 0.5

    def synchronize() -> None:
        machine.now_s += pending[0]
        pending[0] = 0.0

    times = interleave({"gpu": Contender(launch, 1)}, EXACT, machine.clock, synchronize)
    assert times["gpu"] == pytest.approx([0.5] * 9)


def test_a_call_that_runs_many_kernels_is_timed_per_kernel() -> None:
    machine = Machine()
    graph = Contender(machine.kernel("graph", 8.0), copies=1, kernels=4)
    pace = Pace(max_rounds=5, row_s=1e9, turn_s=30.0)
    assert interleave({"graph": graph}, pace, machine.clock)["graph"] == [2.0] * 5
    assert len(machine.log) == 2 + 4 + 5 * 4


def test_what_a_turn_needs_is_made_ready_outside_of_its_time() -> None:
    machine = Machine()

    def ready() -> None:
        machine.now_s += 100.0

    contenders = {"slow": Contender(machine.kernel("slow", 0.5), 1, prepare=ready)}
    assert interleave(contenders, EXACT, machine.clock)["slow"] == pytest.approx([0.5] * 9)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_quartiles_enclose_the_median(values: list[float]) -> None:
    figure = spread(values)
    assert min(values) <= figure.low <= figure.median <= figure.high <= max(values)


def test_the_rival_is_the_stock_kernel_with_the_smallest_median() -> None:
    times = {"torch": [1.0, 1.0, 9.0], "vllm": [2.0, 2.0, 2.0], "full": [0.1, 0.1, 0.1]}
    assert fastest(times, ["torch", "vllm"]) == "torch"
