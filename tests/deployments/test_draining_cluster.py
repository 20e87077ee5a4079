"""A replica that Serve stops tells the fleet itself, whether or not a router has noticed."""

import pytest
from ray import serve

from dps_ray.fleet.state import Health

from .cheap import cheap_app
from .cluster import Cluster
from .fleet import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

DRAIN_S = 4.0


def test_replica_that_is_stopped_says_so_before_it_is_gone(cluster: Cluster) -> None:
    """Nothing was ever sent to it, so no router knows it and its draining cannot be inferred."""
    app = cheap_app(num_replicas=1, graceful_shutdown_wait_loop_s=DRAIN_S)
    cluster.run(app, "leaving", "/leaving")

    def health() -> set[str]:
        return {entry["state"]["health"] for entry in cluster.replicas("leaving")}

    until(lambda: health() == {Health.READY})
    assert not [r for r in cluster.status()["routers"] if r["application"] == "leaving"]
    serve.delete("leaving", _blocking=False)
    taken_s = until(lambda: health() == {Health.DRAINING})
    print(f"a replica that is stopped says so after {taken_s:.2f} s")
    until(lambda: "leaving" not in serve.status().applications, timeout_s=60.0)
