"""The paper's decision process: monotone policies, and a bound that bounds."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_ray.scheduling.mdp import FAST, FULL, SwitchingMdp, Thresholds
from dps_ray.scheduling.occupancy import fitted_walk, random_walk

LEVELS = 12
amounts = st.floats(0.0, 10.0, allow_subnormal=False)
kernels = st.one_of(
    st.tuples(st.floats(0, 0.4), st.floats(0, 0.4), st.floats(0, 0.2), st.integers(1, 6)).map(
        lambda c: random_walk(LEVELS, up=c[0], down=c[1], burst=c[2], burst_levels=c[3])
    ),
    st.lists(st.floats(0, LEVELS - 1), min_size=3, max_size=40).map(
        lambda series: fitted_walk(LEVELS, [series])
    ),
)


@st.composite
def monotone_mdps(draw: st.DrawFn) -> SwitchingMdp:
    """What the theorem asks for: the advantage of fast mode never falls with occupancy."""
    fast = np.array(draw(st.lists(amounts, min_size=LEVELS, max_size=LEVELS)))
    growth = np.array(draw(st.lists(amounts, min_size=LEVELS, max_size=LEVELS)))
    advantage = np.cumsum(growth) - draw(st.floats(0, 60))
    return SwitchingMdp(
        cost=np.stack([fast + advantage, fast], axis=1),
        switch_cost=(draw(amounts), draw(amounts)),
        kernel=draw(kernels),
        discount=draw(st.floats(0.0, 0.98)),
    )


thresholds = st.builds(Thresholds, st.integers(0, LEVELS), st.integers(-1, LEVELS - 1))


@settings(max_examples=60, deadline=None)
@given(monotone_mdps())
def test_under_the_papers_assumptions_the_optimum_is_two_thresholds_with_a_gap(
    mdp: SwitchingMdp,
) -> None:
    assert mdp.violated_assumptions() == []
    solution = mdp.solve()
    assert solution.monotone
    found = solution.thresholds
    assert found.to_full < found.to_fast
    assert np.array_equal(mdp.threshold_policy(found), solution.policy)
    assert solution.miscalibration(solution.policy) == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(monotone_mdps())
def test_the_worth_of_fast_mode_grows_with_occupancy_and_meets_the_switching_costs(
    mdp: SwitchingMdp,
) -> None:
    solution = mdp.solve()
    worth, (to_full, to_fast) = solution.worth_of_fast, mdp.switch_cost
    slack = 1e-6 * (1.0 + np.abs(worth).max())
    assert (np.diff(worth) >= -slack).all()
    found = solution.thresholds
    assert (worth[found.to_fast :] >= to_fast - slack).all()
    assert (worth[: found.to_fast] <= to_fast + slack).all()
    assert (worth[: found.to_full + 1] <= -to_full + slack).all()
    assert (worth[found.to_full + 1 :] >= -to_full - slack).all()


@settings(max_examples=60, deadline=None)
@given(monotone_mdps(), thresholds)
def test_no_thresholds_cost_more_above_the_optimum_than_the_bound(
    mdp: SwitchingMdp, chosen: Thresholds
) -> None:
    solution = mdp.solve()
    policy = mdp.threshold_policy(chosen)
    slack = 1e-6 * (1.0 + np.abs(solution.value).max())
    assert -slack <= solution.loss(policy) <= solution.bound(policy) + slack


@settings(max_examples=25, deadline=None)
@given(monotone_mdps(), st.data())
def test_value_iteration_finds_what_trying_every_policy_finds(
    mdp: SwitchingMdp, data: st.DataObject
) -> None:
    small = SwitchingMdp(
        mdp.cost[:3], mdp.switch_cost, data.draw(st.sampled_from([
            random_walk(3, up=0.3, down=0.2), np.array([[0, 0, 1.0], [0.5, 0.5, 0], [1.0, 0, 0]]),
        ])), mdp.discount,
    )  # fmt: skip
    policies = [np.array(bits).reshape(3, 2) for bits in itertools.product([False, True], repeat=6)]
    best = np.min([small.evaluate(policy) for policy in policies], axis=0)
    assert small.solve().value == pytest.approx(best, rel=1e-6, abs=1e-6)


def simulated_cost(
    mdp: SwitchingMdp, policy: np.ndarray, start: tuple[int, int], runs: int, seed: int
) -> tuple[float, float]:
    """Mean discounted cost of simulated lives from ``start``, and its standard error."""
    generator = np.random.default_rng(seed)
    cumulative = mdp.kernel.cumsum(axis=1)
    level, mode = np.full(runs, start[0]), np.full(runs, start[1])
    total, weight = np.zeros(runs), 1.0
    while weight > 1e-6:
        coming = policy[level, mode].astype(int)
        switch = np.where(coming == FAST, mdp.switch_cost[1], mdp.switch_cost[0])
        total += weight * (mdp.cost[level, coming] + np.where(coming == mode, 0.0, switch))
        draws = generator.random(runs)
        level = np.minimum((cumulative[level] < draws[:, None]).sum(axis=1), mdp.levels - 1)
        mode, weight = coming, weight * mdp.discount
    return float(total.mean()), float(total.std() / np.sqrt(runs))


@pytest.mark.parametrize("chosen", [Thresholds(9, 6), Thresholds(3, 1), Thresholds(12, -1)])
@pytest.mark.parametrize("start", [(0, FULL), (11, FULL), (5, FAST)])
def test_simulated_lives_cost_what_evaluation_says_and_stay_within_the_bound(
    chosen: Thresholds, start: tuple[int, int]
) -> None:
    blocks = np.arange(LEVELS)
    cost = np.stack([10 + 8.0 * np.maximum(0, blocks - 7), np.full(LEVELS, 13.0)], axis=1)
    walk = random_walk(LEVELS, up=0.25, down=0.35, burst=0.05, burst_levels=5)
    mdp = SwitchingMdp(cost, (40.0, 1.0), walk, 0.95)
    solution, policy = mdp.solve(), mdp.threshold_policy(chosen)
    mean, error = simulated_cost(mdp, policy, start, runs=4000, seed=11)
    cut_off = 1e-6 * np.abs(cost).max() / (1 - mdp.discount)
    assert abs(mean - mdp.evaluate(policy)[start]) < 5 * error + cut_off
    assert mean - solution.value[start] <= solution.bound(policy) + 5 * error


def test_broken_assumptions_are_named() -> None:
    falling = np.stack([np.array([5.0, 1.0, 0.0]), np.zeros(3)], axis=1)
    swap = np.array([[0, 0, 1.0], [0, 1.0, 0], [1.0, 0, 0]])
    wrong = SwitchingMdp(falling, (1.0, 1.0), swap, 0.9).violated_assumptions()
    assert len(wrong) == 2
    assert "falls with occupancy (first from level 0 to 1)" in wrong[0]
    assert "not stochastically monotone" in wrong[1]


def test_a_policy_that_goes_back_at_higher_occupancy_is_not_called_monotone() -> None:
    middle = np.stack([np.array([0.0, 9.0, 0.0]), np.array([5.0, 5.0, 5.0])], axis=1)
    assert not SwitchingMdp(middle, (0.1, 0.1), np.eye(3), 0.5).solve().monotone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": np.full((2, 2), 0.4)}, "kernel has a row that is no distribution"),
        ({"kernel": np.eye(3)}, r"kernel has shape \(3, 3\): give \[2, 2\]"),
        ({"discount": 1.0}, r"discount is 1\.0"),
        ({"switch_cost": (-1.0, 0.0)}, "a switch cannot be a gain"),
        ({"cost": np.full((2, 2), np.nan)}, "give finite"),
    ],
)
def test_impossible_numbers_are_refused(change: dict[str, object], message: str) -> None:
    good = {
        "cost": np.zeros((2, 2)), "switch_cost": (0.0, 0.0), "kernel": np.eye(2), "discount": 0.5,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        SwitchingMdp(**{**good, **change})


@settings(max_examples=60, deadline=None)
@given(kernels)
def test_every_occupancy_kernel_is_a_monotone_distribution(kernel: np.ndarray) -> None:
    mdp = SwitchingMdp(np.zeros((LEVELS, 2)), (0.0, 0.0), kernel, 0.5)
    assert mdp.violated_assumptions() == []


def test_a_fitted_walk_returns_to_where_the_run_stayed() -> None:
    generator = np.random.default_rng(5)
    series, level = [], 2.0
    for _ in range(4000):
        level = 0.9 * level + 0.1 * 6.0 + generator.normal(0, 0.8)
        series.append(level)
    kernel = fitted_walk(20, [series])
    drift = kernel @ np.arange(20) - np.arange(20)
    assert drift[0] > 0.3
    assert drift[19] < -0.9
    assert abs(drift[6]) < 0.15


def test_a_walk_needs_two_readings_and_chances_that_are_chances() -> None:
    with pytest.raises(ValueError, match="fewer than two readings"):
        fitted_walk(4, [[1.0]])
    with pytest.raises(ValueError, match="no chances that sum to 1"):
        random_walk(4, up=0.7, down=0.6)
