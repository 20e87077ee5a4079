"""What the fleet's own code costs: one routing decision, and the controller at full heartbeat.

Both are measured without Ray: the transport's cost is Ray's and comes on top.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.policies import Policy
from dps_ray.fleet.publication import ControllerOptions, Publication
from dps_ray.fleet.routing import Peer
from dps_ray.fleet.snapshot import FreshnessOptions
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.fleet.view import FleetView
from dps_ray.modes import Floor, Mode

BASE_BLOCKS, TOTAL_BLOCKS = 2000, 6000
REQUESTS_PER_REPLICA_S = 2.0
RANKS = 16
TRANSITION_EVERY = 5
"""Every so many-th report of a replica tells another mode than the one before it."""
OTHER_MODE = {Mode.FULL.value: Mode.FAST.value, Mode.FAST.value: Mode.FULL.value}


@dataclass(frozen=True)
class FleetLoad:
    """A simulated fleet: every replica reports once a second."""

    replicas: int = 1000
    seconds: int = 10
    routers: int = 2
    """Routers that listen to the controller."""
    seed: int = 0


def wire_state(number: int, sequence: int, rng: np.random.Generator) -> dict[str, Any]:
    """One report of a busy replica in the form in which it reaches the controller.

    Every hundredth does not know how many requests it has.
    """
    used = int(rng.integers(0, BASE_BLOCKS))
    return ReplicaState(
        replica_id=f"replica-{number:05d}",
        sequence=sequence,
        sent_at_s=0.0,
        source=Source.ENGINE,
        code_version="bench",
        node_id=f"node-{number % 100}",
        deployment="llm#bench",
        health=Health.READY,
        mode=Mode.FAST if rng.random() < 0.2 else Mode.FULL,
        restoring=bool(rng.random() < 0.05),
        used_blocks=used,
        free_blocks=BASE_BLOCKS - used,
        headroom_blocks=TOTAL_BLOCKS - used,
        base_blocks=BASE_BLOCKS,
        total_blocks=TOTAL_BLOCKS,
        running=None if number % 100 == 99 else int(rng.integers(0, 64)),
        waiting=int(rng.integers(0, 4)),
        wants_restore=bool(rng.random() < 0.1),
        may_go_fast=True,
        tokens_full=sequence * 1000,
        tokens_fast=sequence * 100,
    ).model_dump(mode="json")


def measure_controller(load: FleetLoad) -> dict[str, float]:
    """Share of one core that reports and publications take while every replica reports at 1 Hz.

    A fifth of the reports are transitions, each of which every router is told at once.
    """
    first, *rounds = _rounds(load)
    options = ControllerOptions()
    simulated_s = 0.0
    coordinator = Coordinator(options, lambda: simulated_s)
    aggregate = coordinator.aggregate
    for report in first:
        coordinator.report(ReplicaState.model_validate(report))
    read: list[int | None] = [aggregate.version] * load.routers
    sent = 0
    started_s = time.process_time()
    for second, reports in enumerate(rounds, start=1):
        for index, report in enumerate(reports):
            simulated_s = second + index / len(reports)
            reply = coordinator.report(ReplicaState.model_validate(report))
            reply.model_dump(mode="json")
            coordinator.tick()
            for router, version in enumerate(read):
                if version == aggregate.version:
                    continue
                publication = Publication(
                    snapshot=aggregate.changes_since(version),
                    routing=options.routing,
                    freshness=FreshnessOptions(),
                )
                publication.model_dump(mode="json")
                read[router] = aggregate.version
                sent += 1
    busy_s = time.process_time() - started_s
    return {
        "reports_per_s": float(load.replicas),
        "publications_per_s": sent / load.seconds,
        "core_share": busy_s / load.seconds,
        "us_per_report": busy_s / (load.seconds * load.replicas) * 1e6,
    }


def _rounds(load: FleetLoad) -> list[list[dict[str, Any]]]:
    """Reports of every replica: where each starts, then second by second."""
    rng = np.random.default_rng(load.seed)
    rounds = [[wire_state(number, 0, rng) for number in range(load.replicas)]]
    for second in range(1, load.seconds + 1):
        reports = []
        for number, before in enumerate(rounds[-1]):
            kept = {name: before[name] for name in ("mode", "restoring", "wants_restore")}
            if (number + second) % TRANSITION_EVERY == 0:
                kept["mode"] = OTHER_MODE[kept["mode"]]
            reports.append({**wire_state(number, second, rng), **kept})
        rounds.append(reports)
    return rounds


def measure_decisions(policy: Policy, load: FleetLoad, decisions: int) -> dict[str, float]:
    """Time of one decision, requests coming and going and publications arriving in between."""
    rng = np.random.default_rng(load.seed)
    view = FleetView(rng)
    view.offer([Peer(f"replica-{n:05d}", f"node-{n % 100}") for n in range(load.replicas)], 0.0)
    fresh = [wire_state(number, 1, rng) for number in range(load.replicas)]
    view.merge(_publication(policy, 1, fresh), 0.0)
    open_requests: deque[tuple[str, str]] = deque()
    concurrency = int(load.replicas * REQUESTS_PER_REPLICA_S)
    taken_us = np.empty(decisions)
    merges_us: list[float] = []
    spacing_s = 1.0 / concurrency
    merge_every = max(1, concurrency // 4)
    for number in range(decisions):
        now_s = number * spacing_s
        if number % merge_every == 0:
            chosen = rng.choice(load.replicas, size=load.replicas // 4, replace=False)
            states = [wire_state(int(n), number + 2, rng) for n in chosen]
            publication = _publication(policy, number + 2, states)
            started_s = time.perf_counter()
            view.merge(publication, now_s)
            merges_us.append((time.perf_counter() - started_s) * 1e6)
        ask = _ask(number)
        started_s = time.perf_counter()
        decision = view.decide(now_s, ask, limit=RANKS)
        taken_us[number] = (time.perf_counter() - started_s) * 1e6
        name, replica_id = str(number), decision.order[0]
        view.pick(name, replica_id, now_s)
        view.accept(name, replica_id, now_s, ask)
        open_requests.append((name, replica_id))
        if len(open_requests) > concurrency:
            view.finish(*open_requests.popleft(), now_s)
    return {
        "p50_us": float(np.percentile(taken_us, 50)),
        "p99_us": float(np.percentile(taken_us, 99)),
        "max_us": float(taken_us.max()),
        "merge_p50_us": float(np.percentile(merges_us, 50)),
    }


def _ask(number: int) -> Ask:
    floor = Floor.FULL if number % 10 == 0 else Floor.ANY
    session = f"user-{number % 500}" if number % 3 == 0 else None
    prefix = tuple(hash((number % 50, chunk)) for chunk in range(8)) if number % 2 else ()
    return Ask(floor, session, prefix)


def _publication(policy: Policy, version: int, states: list[dict[str, Any]]) -> Publication:
    entries = [
        {"replica_id": state["replica_id"], "standing": "live", "age_s": 0.0, "state": state}
        for state in states
    ]
    return Publication.model_validate(
        {
            "snapshot": {"version": version, "entries": entries},
            "routing": policy,
            "freshness": FreshnessOptions(),
        }
    )
