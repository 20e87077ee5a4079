"""What policies compute in columns is what they say it is, one replica at a time."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.pickers import Probe
from dps_ray.fleet.policies import POLICIES, FullFirst, ModeAware
from dps_ray.fleet.routing import Hint, Tier
from dps_ray.fleet.scorers import Locality
from dps_ray.fleet.state import Health
from dps_ray.modes import Floor, Mode

from . import reference
from .builders import Given, decide, given_replica

counts = st.none() | st.integers(0, 200)


@st.composite
def any_replica(draw: st.DrawFn, replica_id: str) -> Given:
    return given_replica(
        replica_id,
        age_s=draw(st.sampled_from([None, 0.0, 1.0, 10.0])),
        placed_since=draw(st.integers(-5, 20)),
        queue_len=draw(counts),
        node_id=draw(st.sampled_from([None, "here", "there"])),
        hint=draw(
            st.none()
            | st.builds(
                Hint,
                mode=st.none() | st.sampled_from(Mode),
                restoring=st.none() | st.booleans(),
                dead=st.booleans(),
            )
        ),
        health=draw(st.sampled_from(Health)),
        mode=draw(st.none() | st.sampled_from(Mode)),
        restoring=draw(st.none() | st.booleans()),
        used_blocks=draw(counts),
        headroom_blocks=draw(counts),
        total_blocks=draw(counts),
        running=draw(counts),
        waiting=draw(counts),
    )


fleets = st.integers(1, 8).flatmap(lambda n: st.tuples(*(any_replica(f"r{i}") for i in range(n))))
asks = st.builds(
    Ask, floor=st.sampled_from(Floor), session=st.none() | st.sampled_from(["alice", "bob"])
)
prefix_matches = st.dictionaries(st.sampled_from(["r0", "r1", "gone"]), st.floats(0.1, 1.0))


@given(fleets, asks, prefix_matches, st.booleans(), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_columns_equal_the_reference_that_looks_at_one_replica_at_a_time(
    replicas: tuple[Given, ...], ask: Ask, matches: dict[str, float], full_first: bool, limit: int
) -> None:
    chosen = FullFirst if full_first else ModeAware
    policy = chosen(probe=Probe(share=0.0), locality=Locality(weight=0.1))
    expected = reference.costs(policy, replicas, ask, matches, "here")
    decision = decide(policy, *replicas, ask=ask, matches=matches, limit=limit)
    for reason in decision.reasons():
        tier, cost = expected[reason.replica_id]
        assert reason.tier is tier
        assert reason.cost == pytest.approx(cost)
    usable = [key for key in expected.values() if key[0] is not Tier.EXCLUDED]
    picked = [expected[name] for name in decision.order]
    assert len(picked) == min(limit, len(usable))
    for key, best in zip(picked, sorted(usable), strict=False):
        assert key == (best[0], pytest.approx(best[1], abs=1e-6))


@given(fleets, asks, st.integers(1, 9))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("kind", POLICIES.values(), ids=POLICIES)
def test_every_usable_replica_is_ordered_once_and_no_other(
    kind: Any, replicas: tuple[Given, ...], ask: Ask, limit: int
) -> None:
    decision = decide(kind(), *replicas, ask=ask, limit=limit)
    usable = {r.replica_id for r in decision.reasons() if r.tier is not Tier.EXCLUDED}
    assert set(decision.order) <= usable
    assert len(set(decision.order)) == len(decision.order) == min(limit, len(usable))
