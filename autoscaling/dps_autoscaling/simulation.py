"""A fleet that is simulated around the real policy: what would it have done to a recorded burst?

A model, not a measurement: replicas are counters of KV tokens, requests take the time that their
lengths say, and the earliest comes first. Real are the policy, Ray's ``AutoscalingConfig``, its
delays and bounds, the period at which replicas report, and the trace.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext

from dps_autoscaling.serve_rules import Policy, next_target
from dps_autoscaling.signals import to_stats
from dps_ray.bench.traces import TraceRequest
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.modes import Mode

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """What a simulated replica is worth; times in seconds, sizes in KV blocks of 16 tokens."""

    base_blocks: int = 2500
    lendable_blocks: int = 1500
    prefill_tokens_per_s: float = 4000.0
    decode_tokens_per_s: float = 20.0
    """Of one request."""
    start_s: float = 60.0
    """From the decision until the replica serves."""
    restore_s: float = 4.0
    low_watermark: float = 0.6
    """Share of base blocks in use below which lent memory may return."""
    report_s: float = 10.0
    """Serve's period between two reports of a replica."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The fleet at one second."""

    time_s: float
    running: int
    target: int
    fast: int
    requests: int
    """Running and queued."""
    queued: int
    demand_blocks: int


@dataclass
class _Replica:
    model: ReplicaModel
    ready_at_s: float
    ends: list[tuple[float, int]] = field(default_factory=list)
    """End and KV blocks of each running request."""
    fast: bool = False
    restored_at_s: float | None = None
    samples: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    reported: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    reported_at_s: float = float("-inf")

    @property
    def used(self) -> int:
        return sum(blocks for _, blocks in self.ends)

    def step(self, now_s: float) -> None:
        """Finish requests, switch modes as demand says, and take a sample."""
        self.ends = [entry for entry in self.ends if entry[0] > now_s]
        if self.used > self.model.base_blocks:
            self.fast, self.restored_at_s = True, None
        elif self.fast and self.used <= self.model.low_watermark * self.model.base_blocks:
            if self.restored_at_s is None:
                self.restored_at_s = now_s + self.model.restore_s
            elif now_s >= self.restored_at_s:
                self.fast, self.restored_at_s = False, None

    @property
    def restoring(self) -> bool:
        return self.restored_at_s is not None

    def admits(self, blocks: int) -> bool:
        room = self.model.base_blocks + self.model.lendable_blocks
        return not self.restoring and (not self.ends or self.used + blocks <= room)

    def sample(self, now_s: float, look_back_s: float) -> None:
        state = ReplicaState(
            replica_id="simulated",
            sequence=0,
            sent_at_s=now_s,
            source=Source.ENGINE,
            code_version="",
            health=Health.READY,
            mode=Mode.FAST if self.fast else Mode.FULL,
            restoring=self.restoring,
            full_requests=0,
            used_blocks=self.used,
            base_blocks=self.model.base_blocks,
            waiting=0,
        )
        self.samples.append((now_s, to_stats(state)))
        while self.samples[0][0] < now_s - look_back_s:
            self.samples.popleft()
        if now_s - self.reported_at_s >= self.model.report_s:
            self.reported, self.reported_at_s = list(self.samples), now_s


@dataclass(frozen=True, slots=True)
class _Point:
    timestamp: float
    value: float


def simulate(
    trace: Sequence[TraceRequest],
    policy: Policy,
    config: AutoscalingConfig,
    model: ReplicaModel,
    *,
    tail_s: float = 0.0,
) -> list[Tick]:
    """Run a trace through the model, a second at a time.

    Parameters
    ----------
    trace
        Requests in order of arrival.
    policy, config
        As Serve would hold them.
    model
        One replica.
    tail_s
        Time after the last arrival, seconds.
    """
    arrivals, queue = deque(trace), deque[TraceRequest]()
    target = config.initial_replicas or config.min_replicas
    fleet = [_Replica(model, 0.0) for _ in range(target)]
    state: dict[str, Any] = {}
    history: deque[tuple[float, int, int]] = deque()
    ticks = []
    for second in range(int(trace[-1].arrival_s + tail_s) + 1):
        now_s = float(second)
        while arrivals and arrivals[0].arrival_s <= now_s:
            queue.append(arrivals.popleft())
        up = [replica for replica in fleet if replica.ready_at_s <= now_s]
        for replica in up:
            replica.step(now_s)
        _place(queue, up, model, now_s)
        for replica in up:
            replica.sample(now_s, config.look_back_period_s)
        requests = len(queue) + sum(len(replica.ends) for replica in up)
        history.append((now_s, requests, len(queue)))
        while history[0][0] < now_s - config.look_back_period_s:
            history.popleft()
        target, state = next_target(policy, _context(up, target, history, state, config, now_s))
        _resize(fleet, target, model, now_s)
        ticks.append(
            Tick(
                now_s,
                len(up),
                target,
                sum(replica.fast for replica in up),
                requests,
                len(queue),
                sum(replica.used for replica in up),
            )
        )
    return ticks


def _place(
    queue: deque[TraceRequest], up: Sequence[_Replica], model: ReplicaModel, now_s: float
) -> None:
    """Give the earliest requests to the replicas with most room."""
    while queue:
        request = queue[0]
        blocks = -(-(request.prompt_tokens + request.output_tokens) // BLOCK_TOKENS)
        open_to = [replica for replica in up if replica.admits(blocks)]
        if not open_to:
            return
        taken_s = (
            request.prompt_tokens / model.prefill_tokens_per_s
            + request.output_tokens / model.decode_tokens_per_s
        )
        least = min(open_to, key=lambda replica: replica.used)
        least.ends.append((now_s + taken_s, blocks))
        queue.popleft()


def _resize(fleet: list[_Replica], target: int, model: ReplicaModel, now_s: float) -> None:
    """Start replicas, or stop the emptiest: what it still has is finished elsewhere in no time."""
    while len(fleet) < target:
        fleet.append(_Replica(model, now_s + model.start_s))
    while len(fleet) > target:
        fleet.remove(min(fleet, key=lambda replica: replica.used))


def _context(
    up: Sequence[_Replica],
    target: int,
    history: Sequence[tuple[float, int, int]],
    state: dict[str, Any],
    config: AutoscalingConfig,
    now_s: float,
) -> AutoscalingContext:
    raw: dict[str, dict[int, list[_Point]]] = {}
    for index, replica in enumerate(up):
        for at_s, stats in replica.reported:
            for name, value in stats.items():
                raw.setdefault(name, {}).setdefault(index, []).append(_Point(at_s, value))
    means = {
        name: {
            index: sum(point.value for point in points) / len(points)
            for index, points in series.items()
        }
        for name, series in raw.items()
    }
    return AutoscalingContext(
        deployment_id="simulated",
        deployment_name="simulated",
        app_name=None,
        current_num_replicas=len(up),
        target_num_replicas=target,
        running_replicas=list(range(len(up))),
        total_num_requests=sum(requests for _, requests, _ in history) / len(history),
        total_queued_requests=sum(queued for _, _, queued in history) / len(history),
        aggregated_metrics=means,
        raw_metrics=raw,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=config,
    )
