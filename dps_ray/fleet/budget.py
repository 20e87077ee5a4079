"""The fleet's precision budget: how much of it may be in fast mode at once.

A replica must go fast the moment a burst comes, so the permit has to be there before: the budget
hands out *allowances* in advance. A replica keeps its allowance until it has been told otherwise
and has confirmed it, also while no controller is alive, so that the number of replicas that could
be fast stays within the budget.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dps_ray.fleet.shares import share_of
from dps_ray.fleet.state import Health, ReplicaState, Share
from dps_ray.modes import Mode

_CLEAR_MARGIN = 0.2
"""An allowance moves only to a replica that uses so much more of its KV memory, a share."""


class BudgetOptions(BaseModel):
    """Limits on fast mode over the whole fleet; by default there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_fast_replica_share: Share | None = None
    """Largest share of the live replicas in fast mode at once. It is a bound, so the number is
    rounded down; but a share above 0 always allows one replica, or a fleet of one or two would
    never go fast. 0 allows none."""
    max_fast_token_share: Share | None = None
    """Largest share of tokens made in fast mode over ``window_s``. While it is exceeded no replica
    in full mode may leave it; those in fast mode return as their load allows."""
    window_s: Annotated[float, Field(gt=0.0)] = 300.0

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return self.max_fast_replica_share is not None or self.max_fast_token_share is not None


class PrecisionBudget:
    """Allowances of a fleet, rebuilt from reports after a restart.

    Parameters
    ----------
    options
        Limits; replace them with ``reconfigure``.
    clock
        Monotonic seconds.
    settle_s
        A new budget gives no allowance before it had this time to hear who has one.
    """

    def __init__(
        self, options: BudgetOptions, clock: Callable[[], float], settle_s: float = 5.0
    ) -> None:
        self._options = options
        self._clock = clock
        self._settle_s = settle_s
        self._settled_at_s = clock() + settle_s
        self._holders: dict[str, _Holder] = {}
        self._claim: tuple[str, float] | None = None
        """For whom an allowance was withdrawn, and until when it is kept for that replica."""
        self._tokens = _TokenWindow()

    def reconfigure(self, options: BudgetOptions) -> None:
        """Change the limits; allowances beyond a lower one are withdrawn one by one."""
        if options.limited and not self._options.limited:
            self._settled_at_s = self._clock() + self._settle_s
        self._options = options

    @property
    def fast_token_share(self) -> float | None:
        """Share of fast tokens in the window; ``None`` before the first token."""
        return self._tokens.share(self._clock(), self._options.window_s)

    @property
    def holders(self) -> int:
        """Replicas that have an allowance or have not yet confirmed its end."""
        return len(self._holders)

    def answer(self, state: ReplicaState, live: int) -> bool:
        """Whether the reporting replica may leave full mode, or stay out of it.

        Parameters
        ----------
        state
            The report; ``may_go_fast`` in it confirms the latest answer.
        live
            Number of live replicas.
        """
        now_s = self._clock()
        self._tokens.note(state, now_s, self._options.window_s)
        if not self._options.limited:
            self._holders.clear()
            return True
        replica_id = state.replica_id
        if state.health is Health.DEAD:
            self.forget(replica_id)
            return False
        holder = self._holders.get(replica_id)
        if state.mode is Mode.FAST or state.may_go_fast is not False:
            # Whoever gave it: what the replica could do is what counts.
            holder = self._holders.setdefault(replica_id, _Holder())
        elif holder is not None and holder.leaving:
            del self._holders[replica_id]
            return False
        slots = self._slots(live)
        if holder is None:
            taken = len(self._holders) + self._is_claimed_by_another(replica_id, now_s)
            if taken < slots and now_s >= self._settled_at_s:
                self._claim = None if self._is_claimant(replica_id) else self._claim
                self._holders[replica_id] = _Holder(usage=state.kv_usage)
                return True
            self._make_room_for(state, now_s)
            return False
        holder.usage = state.kv_usage
        if state.mode is Mode.FAST:
            holder.leaving = False
        elif sum(not other.leaving for other in self._holders.values()) > slots:
            holder.leaving = True
        return not holder.leaving

    def forget(self, replica_id: str) -> None:
        """Drop a replica that is gone."""
        self._holders.pop(replica_id, None)
        self._tokens.forget(replica_id)
        if self._is_claimant(replica_id):
            self._claim = None

    def _is_claimant(self, replica_id: str) -> bool:
        return self._claim is not None and self._claim[0] == replica_id

    def _is_claimed_by_another(self, replica_id: str, now_s: float) -> bool:
        if self._claim is None or self._is_claimant(replica_id):
            return False
        return now_s < self._claim[1]

    def _slots(self, live: int) -> int:
        options = self._options
        share = self.fast_token_share
        if (
            options.max_fast_token_share is not None
            and share is not None
            and share > options.max_fast_token_share
        ):
            return 0
        if options.max_fast_replica_share is None:
            return live
        return share_of(live, options.max_fast_replica_share)

    def _make_room_for(self, state: ReplicaState, now_s: float) -> None:
        """Withdraw the allowance of the idlest replica when this one is clearly busier."""
        staying = [holder for holder in self._holders.values() if not holder.leaving]
        if state.kv_usage is None or len(staying) < len(self._holders) or not staying:
            return
        idlest = min(staying, key=lambda holder: 1.0 if holder.usage is None else holder.usage)
        if idlest.usage is not None and idlest.usage + _CLEAR_MARGIN < state.kv_usage:
            idlest.leaving = True
            self._claim = state.replica_id, now_s + self._settle_s


@dataclass(slots=True)
class _Holder:
    usage: float | None = None
    """Share of its KV memory in use."""
    leaving: bool = False
    """The allowance is withdrawn, and the replica has not confirmed it yet."""


class _TokenWindow:
    """Tokens of either mode over the recent past, from counters that only grow."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        self._changes: deque[tuple[float, int, int]] = deque()
        self._full = self._fast = 0

    def note(self, state: ReplicaState, now_s: float, window_s: float) -> None:
        if state.tokens_full is None or state.tokens_fast is None:
            return
        full, fast = self._last.get(state.replica_id, (state.tokens_full, state.tokens_fast))
        self._last[state.replica_id] = (state.tokens_full, state.tokens_fast)
        made_full, made_fast = state.tokens_full - full, state.tokens_fast - fast
        if made_full or made_fast:
            self._changes.append((now_s, made_full, made_fast))
            self._full += made_full
            self._fast += made_fast
        self._trim(now_s, window_s)

    def share(self, now_s: float, window_s: float) -> float | None:
        self._trim(now_s, window_s)
        total = self._full + self._fast
        return self._fast / total if total else None

    def forget(self, replica_id: str) -> None:
        self._last.pop(replica_id, None)

    def _trim(self, now_s: float, window_s: float) -> None:
        while self._changes and now_s - self._changes[0][0] > window_s:
            _, full, fast = self._changes.popleft()
            self._full -= full
            self._fast -= fast
