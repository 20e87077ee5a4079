"""The paper's model of switching (section IV-D): a discounted decision process, solved exactly.

The state is ``(k, m)``: KV occupancy level ``k`` and mode ``m`` (0 full, 1 fast). At each decision
the replica stays or switches, which is to choose the mode ``a`` of the coming period. It pays
``cost[k, a]``, plus the switching cost when ``a`` differs from ``m``; then the occupancy moves by
``kernel[k, :]``, whatever the mode: demand is the users'.

Where the cost of full mode over fast mode does not fall as ``k`` grows, and the kernel is
stochastically monotone, the optimal value is submodular in ``(k, m)``: the worth of being in fast
mode grows with ``k``, so the optimal policy is two thresholds with a gap.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Policy = NDArray[np.bool_]
"""``[levels, 2]``: whether the coming period is fast, by occupancy level and present mode."""

FULL, FAST = 0, 1
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Thresholds:
    """Occupancy levels at which a policy switches."""

    to_fast: int
    """In full mode: switch from this level up; the number of levels for never."""
    to_full: int
    """In fast mode: switch at this level and below; -1 for never."""


@dataclass(frozen=True)
class SwitchingMdp:
    """Costs and movements of one replica. All arrays by occupancy level.

    Raises
    ------
    ValueError
        Naming the field that cannot be.
    """

    cost: Floats
    """``[levels, 2]``: cost of a period spent at a level in full and in fast mode."""
    switch_cost: tuple[float, float]
    """Cost of a switch to full and of a switch to fast mode, in the unit of ``cost``."""
    kernel: Floats
    """``[levels, levels]``: chance of each level in the next period."""
    discount: float
    """Weight of the next period's cost against this one's (the paper's gamma)."""

    def __post_init__(self) -> None:
        levels = len(self.cost)
        if self.cost.shape != (levels, 2) or not np.isfinite(self.cost).all():
            raise ValueError(f"cost has shape {self.cost.shape}: give finite [levels, 2]")
        if self.kernel.shape != (levels, levels):
            raise ValueError(f"kernel has shape {self.kernel.shape}: give [{levels}, {levels}]")
        if (self.kernel < 0).any() or not np.allclose(self.kernel.sum(axis=1), 1.0):
            raise ValueError("kernel has a row that is no distribution: rows must sum to 1")
        if not 0.0 <= self.discount < 1.0:
            raise ValueError(f"discount is {self.discount}: give 0 or more and less than 1")
        if min(self.switch_cost) < 0.0:
            raise ValueError(f"switch_cost is {self.switch_cost}: a switch cannot be a gain")

    @property
    def levels(self) -> int:
        """Number of occupancy levels."""
        return len(self.cost)

    def violated_assumptions(self) -> list[str]:
        """Sentences on what the theorem asks and these numbers do not give; empty if all holds."""
        wrong = []
        advantage = self.cost[:, FULL] - self.cost[:, FAST]
        if (np.diff(advantage) < -_TOLERANCE).any():
            level = int(np.argmin(np.diff(advantage)))
            wrong.append(
                "the cost of full mode over fast mode falls with occupancy (first from level "
                f"{level} to {level + 1})"
            )
        tails = np.cumsum(self.kernel[:, ::-1], axis=1)[:, ::-1]
        if (np.diff(tails, axis=0) < -_TOLERANCE).any():
            wrong.append("the occupancy kernel is not stochastically monotone")
        return wrong

    def action_costs(self, value: Floats) -> Floats:
        """Cost from now on of each coming mode, ``[levels, present mode, coming mode]``.

        Parameters
        ----------
        value
            ``[levels, 2]``: cost from the next period on.
        """
        coming = self.cost + self.discount * self.kernel @ value
        to_full, to_fast = self.switch_cost
        costs = np.repeat(coming[:, None, :], 2, axis=1)
        costs[:, FAST, FULL] += to_full
        costs[:, FULL, FAST] += to_fast
        return costs

    def solve(self) -> "Solution":
        """Find an optimal policy by value iteration; ties stay in the present mode."""
        value = np.zeros((self.levels, 2))
        scale = float(np.abs(self.cost).max()) + max(self.switch_cost)
        while True:
            improved = self.action_costs(value).min(axis=2)
            change = float(np.abs(improved - value).max())
            value = improved
            if change * self.discount <= _TOLERANCE * (1.0 - self.discount) * max(scale, 1e-300):
                break
        policy = self._greedy(value)
        # The policy's own value, to the last bits: value iteration leaves the discounted rest.
        return Solution(self, self.evaluate(policy), policy)

    def evaluate(self, policy: Policy) -> Floats:
        """Cost of obeying ``policy`` for ever, ``[levels, 2]``."""
        levels, size = self.levels, 2 * self.levels
        fast = policy.astype(np.intp)
        move = np.zeros((levels, 2, levels, 2))
        paid = np.empty((levels, 2))
        to_full, to_fast = self.switch_cost
        for mode in (FULL, FAST):
            for level in range(levels):
                coming = fast[level, mode]
                move[level, mode, :, coming] = self.kernel[level]
                switch = 0.0 if coming == mode else (to_fast if coming == FAST else to_full)
                paid[level, mode] = self.cost[level, coming] + switch
        system = np.eye(size) - self.discount * move.reshape(size, size)
        solved = np.linalg.solve(system, paid.reshape(size))
        return np.asarray(solved, dtype=np.float64).reshape(levels, 2)

    def threshold_policy(self, thresholds: Thresholds) -> Policy:
        """Hysteresis: fast from ``to_fast`` up, full from ``to_full`` down, else as it was."""
        level = np.arange(self.levels)
        return np.stack([level >= thresholds.to_fast, level > thresholds.to_full], axis=1)

    def _greedy(self, value: Floats) -> Policy:
        costs = self.action_costs(value)
        gain = np.abs(costs).max() * _TOLERANCE
        from_full = costs[:, FULL, FAST] < costs[:, FULL, FULL] - gain
        stay_fast = costs[:, FAST, FAST] <= costs[:, FAST, FULL] + gain
        return np.stack([from_full, stay_fast], axis=1)


@dataclass(frozen=True)
class Solution:
    """An optimal policy of a ``SwitchingMdp`` and what it costs."""

    mdp: SwitchingMdp
    value: Floats
    """``[levels, 2]``: the least cost from now on."""
    policy: Policy

    @property
    def worth_of_fast(self) -> Floats:
        """How much more the coming period and all after it cost in full mode, by level.

        The replica switches to fast where this reaches the cost of doing so, and back where its
        negative does: the paper's points of indifference.
        """
        coming = self.mdp.cost + self.mdp.discount * self.mdp.kernel @ self.value
        worth: Floats = coming[:, FULL] - coming[:, FAST]
        return worth

    @property
    def monotone(self) -> bool:
        """Once fast at some occupancy, fast at every higher one, in either mode."""
        return not (self.policy[:-1] & ~self.policy[1:]).any()

    @property
    def thresholds(self) -> Thresholds:
        """Where a monotone policy switches."""
        in_full, in_fast = self.policy[:, FULL], self.policy[:, FAST]
        return Thresholds(
            to_fast=int(np.argmax(in_full)) if in_full.any() else self.mdp.levels,
            to_full=int(np.flatnonzero(~in_fast).max(initial=-1)),
        )

    def miscalibration(self, policy: Policy) -> float:
        """The paper's E: the most that one decision of ``policy`` costs above the best one."""
        costs = self.mdp.action_costs(self.value)
        taken = np.take_along_axis(costs, policy.astype(np.intp)[:, :, None], axis=2)[:, :, 0]
        return max(0.0, float((taken - self.value).max()))

    def bound(self, policy: Policy) -> float:
        """E / (1 - gamma): no start costs more than this above the optimum under ``policy``."""
        return self.miscalibration(policy) / (1.0 - self.mdp.discount)

    def loss(self, policy: Policy) -> float:
        """What ``policy`` really costs above the optimum, from its worst start."""
        return float((self.mdp.evaluate(policy) - self.value).max())
