"""Runs the soak: random operations, by seed, until they are done or something breaks."""

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dps_ray.checks.soak import DWELL_S, RANKS, Soak
from dps_ray.checks.soak_requests import LONGEST_PREFIX, TOPICS
from dps_ray.checks.soak_rules import Rules
from dps_ray.memory.region import Binding
from dps_ray.modes import Pin

SWITCH_INTERVAL_S = 1e-4
"""How long Python lets one thread run: short, so that the restores run between all lines."""

EARLY_OPERATIONS = 1000
EARLY_FACTOR = 5.0
"""Operations that seldom hit anything come so much more often among the first ones: a short soak
must see them hit as well, and a long one need not wait for them all the time."""


@dataclass
class SoakOutcome:
    """What a soak did, and what was wrong, if anything was."""

    operations: int | None
    """None where the process died before it could tell."""
    counts: Counter[str] = field(default_factory=Counter)
    broken: str | None = None


def run_soak(
    operations: int,
    seed: int,
    binding: Binding = "fixed",
    rules: Rules | None = None,
    by_layer: bool = True,
    queued_link: bool = False,
) -> SoakOutcome:
    """Run ``operations`` random operations, or as many as it takes to break an invariant."""
    rng = random.Random(seed)
    done = 0
    with _short_turns():
        soak = Soak(seed, binding, rules, by_layer, queued_link)
        try:
            for done in range(1, operations + 1):
                if done % 64 == 1:
                    load = rng.random()
                operate(soak, rng, load, EARLY_FACTOR if done <= EARLY_OPERATIONS else 1.0)
            soak.settle()
            soak.close()
        except (AssertionError, RuntimeError, ValueError, LookupError) as error:
            for rank in soak.ranks:
                rank.abandon()
            return SoakOutcome(done, soak.counts, f"{type(error).__name__}: {error}")
    counters = soak.manager.counters
    for name in (
        "units_lent",
        "blocks_moved",
        "prefixes_saved",
        "restores_started",
        "restores_completed",
        "restores_cancelled",
        "restores_failed",
        "switches_to_full",
    ):
        soak.counts[name.replace("_", " ")] += getattr(counters, name)
    return SoakOutcome(done, soak.counts)


def operate(soak: Soak, rng: random.Random, load: float, rare_factor: float) -> None:
    """One random operation; ``load`` from 0 to 1 tilts them towards allocation.

    ``rare_factor`` multiplies the chance of what seldom hits anything.
    """
    draw = rng.random()
    name = "step"
    if draw < 0.45:
        if rng.random() < load:
            name = "allocate"
            if rng.random() < 0.4:
                soak.traffic.grow(rng.randrange(1 << 16))
            else:
                soak.traffic.serve(
                    rng.randrange(TOPICS), rng.randint(0, LONGEST_PREFIX), rng.randint(0, 6)
                )
        else:
            name = "free"
            soak.traffic.finish(rng.randrange(1 << 16))
    elif draw < 0.46:
        name = "burst"
        soak.traffic.burst(rng.randrange(8))
    elif draw < 0.48:
        name = "free all"
        soak.traffic.finish_all()
    elif draw < 0.49:
        name = "pin"
        soak.pin(rng.choice((Pin.AUTO, Pin.AUTO, *Pin)))
    elif draw < 0.50:
        name = "damage a copy"
        soak.damage(rng.randrange(RANKS))
    elif draw < 0.52:
        name = "stall a copy"
        soak.stall(rng.randrange(RANKS))
    elif draw < 0.53:
        name = "transfer"
        soak.traffic.transfer(rng.randrange(1 << 16))
    elif draw < 0.55:
        name = "small burst"
        soak.outgrow()
    elif draw < 0.562:
        name = "passing burst"
        soak.pass_by(rng.randrange(8), late=rng.random() < 0.8, busy=rng.random() < load)
    elif draw < 0.592:
        name = "wait for restores"
        soak.settle()
    elif draw < 0.592 + 0.003 * rare_factor:
        name = "stray write"
        soak.disturb()
    elif draw < 0.592 + 0.008 * rare_factor:
        name = "revoke the lease"
        soak.revoke(rng.randint(1, 3))
    else:
        soak.step(
            rng.choice((0.0, 0.05, DWELL_S)), late=rng.random() < 0.6, busy=rng.random() < load
        )
    soak.counts[f"operation {name}"] += 1


@contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
