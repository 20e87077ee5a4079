"""From measured costs to switching thresholds, by way of ``mdp.py``."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dps_ray.scheduling.mdp import Solution, SwitchingMdp, Thresholds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ReplicaCosts:
    """What a period costs a replica, in milliseconds of step time.

    A period is the distance of two decisions: one step, or the sampling period of a run.
    """

    base_blocks: int
    """KV blocks without lending."""
    total_blocks: int
    """KV blocks with every unit lent."""
    step_full_ms: tuple[float, float]
    """Step time in full mode with no block and with ``total_blocks`` in use; linear between."""
    step_fast_ms: tuple[float, float]
    """The same in fast mode."""
    steps_per_period: float
    """Steps in one period."""
    preemption_ms_per_block: float
    """What each block that full mode cannot hold costs a period: its recomputation and waiting."""
    accuracy_ms: float
    """Step time that one full-precision step is worth, over one in fast mode."""
    switch_to_fast_ms: float
    switch_to_full_ms: float
    """What a restore takes from the steps beside it."""

    def by_level(self, levels: int) -> Floats:
        """Cost of a period, ``[levels, 2]``, at occupancies from none to ``total_blocks``."""
        blocks = np.linspace(0, self.total_blocks, levels)
        share = blocks / self.total_blocks
        full = self.step_full_ms[0] + share * (self.step_full_ms[1] - self.step_full_ms[0])
        fast = self.step_fast_ms[0] + share * (self.step_fast_ms[1] - self.step_fast_ms[0])
        missing = np.maximum(0.0, blocks - self.base_blocks)
        return np.stack(
            [
                self.steps_per_period * full + self.preemption_ms_per_block * missing,
                self.steps_per_period * (fast + self.accuracy_ms),
            ],
            axis=1,
        )

    def level_of(self, share_of_base: float, levels: int) -> float:
        """The level, not rounded, of a demand given as a share of base blocks."""
        return share_of_base * self.base_blocks / self.total_blocks * (levels - 1)

    def share_of_base(self, level: float, levels: int) -> float:
        """The inverse of ``level_of``."""
        return level / (levels - 1) * self.total_blocks / self.base_blocks


@dataclass(frozen=True)
class Watermarks:
    """Thresholds in the words of ``DpsOptions``: shares of base blocks."""

    high: float
    low: float


@dataclass(frozen=True)
class Comparison:
    """How far some watermarks are from the optimum, in the unit of the costs."""

    watermarks: Watermarks
    miscalibration: float
    """The paper's E."""
    bound: float
    """E / (1 - gamma)."""
    loss: float
    """The real loss from the worst start; never above ``bound``."""


@dataclass(frozen=True)
class Tuning:
    """A solved model and its translation into options."""

    costs: ReplicaCosts
    solution: Solution

    @property
    def watermarks(self) -> Watermarks:
        """The optimal thresholds as options allow them.

        Above 1 requests would wait for memory that could be lent, so 1 is the most: the switch is
        then the lend itself. The low one stays below the high one.
        """
        levels, found = self.solution.mdp.levels, self.solution.thresholds
        high = min(1.0, self.costs.share_of_base(found.to_fast, levels))
        low = self.costs.share_of_base(max(found.to_full, 0), levels)
        step = self.costs.share_of_base(1, levels)
        return Watermarks(high, max(0.0, min(low, high - step)))

    @property
    def optimum_is_out_of_reach(self) -> bool:
        """The optimal switch to fast mode lies beyond base memory."""
        return (
            self.costs.share_of_base(self.solution.thresholds.to_fast, self.solution.mdp.levels)
            > 1.0
        )

    def compare(self, watermarks: Watermarks) -> Comparison:
        """Bound and real loss of other watermarks."""
        policy = self.solution.mdp.threshold_policy(self.thresholds_of(watermarks))
        solution = self.solution
        return Comparison(
            watermarks, solution.miscalibration(policy), solution.bound(policy),
            solution.loss(policy),
        )  # fmt: skip

    def thresholds_of(self, watermarks: Watermarks) -> Thresholds:
        """The levels at which these watermarks act: demand at or above, at or below."""
        levels = self.solution.mdp.levels
        # A watermark read off a level must come back as that level, whatever the last bits.
        high = self.costs.level_of(watermarks.high, levels) - 1e-6
        low = self.costs.level_of(watermarks.low, levels) + 1e-6
        return Thresholds(int(np.ceil(high)), int(np.floor(low)))


def tune(costs: ReplicaCosts, kernel: Floats, discount: float) -> Tuning:
    """Solve the model of one replica.

    Parameters
    ----------
    costs
        Of one period.
    kernel
        ``[levels, levels]``: how occupancy moves in one period.
    discount
        Weight of the next period against this one.
    """
    cost = costs.by_level(len(kernel))
    switch = (costs.switch_to_full_ms, costs.switch_to_fast_ms)
    return Tuning(costs, SwitchingMdp(cost, switch, kernel, discount).solve())
