"""What the controller costs as it is deployed: reports and publications in, replies out.

The controller is the real application on a Ray cluster of its own. Replicas are played: each sends
one report a second, by the same client and in the same form as a real one, and waits for the reply
before it sends the next. A thousand of them share a few processes, where real ones have one each.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import ray
from dps_deployments.controller import fleet_controller
from dps_deployments.controller_client import CONTROLLER_DEPLOYMENT
from ray import serve

from dps_ray.fleet_cost.players import Listener, Player

HANDLE_REPLICAS = 200
"""Replicas that report over Serve's handle for comparison: more than a few hundred overload it."""
WARM_UP_S = 5
START_DELAY_S = 1.0
AUTH_VARIABLE = "RAY_AUTH_MODE"
OBJECT_STORE_BYTES = 100 << 20


@dataclass(frozen=True)
class ServeLoad:
    """A played fleet: every replica reports once a second."""

    replicas: int = 1000
    seconds: int = 20
    senders: int = 2
    """Processes that play the replicas."""
    routers: int = 2
    """Routers that listen to the controller, all in one process more."""


def measure_serve(load: ServeLoad) -> dict[str, dict[str, Any]]:
    """Share of one core that the controller's process takes, and how old states are on arrival.

    Returns
    -------
    dict
        ``direct``, for calls to the controller's own port, and ``handle``, for calls over Serve's
        handles by a smaller fleet, each with rates, calls that were not answered in time
        (``refused``), shares of one core, and milliseconds: ``round_trip`` from a report's sending
        to its reply, ``router_age`` from there to the moment when a router has it. ``by_handle``
        counts the calls over handles, which may not be the same as those that were meant to be.
    """
    fewer = replace(load, replicas=min(load.replicas, HANDLE_REPLICAS))
    with _cluster():
        return {"direct": _measure(load, "direct"), "handle": _measure(fewer, "handle")}


def _measure(load: ServeLoad, way: str) -> dict[str, Any]:
    with _controller(way) as process:
        share = -(-load.replicas // load.senders)
        actor = ray.remote(num_cpus=0)(Player)
        senders = [
            actor.remote(way, range(first, min(first + share, load.replicas)))
            for first in range(0, load.replicas, share)
        ]
        listener = ray.remote(num_cpus=0)(Listener).remote(way)
        ray.get([player.ready.remote() for player in [*senders, listener]])
        begin_s = time.monotonic() + START_DELAY_S
        window = begin_s + WARM_UP_S, begin_s + WARM_UP_S + load.seconds
        sent = [sender.play.remote(begin_s, window) for sender in senders]
        heard = listener.listen.remote(load.routers, window)
        time.sleep(max(0.0, window[0] - time.monotonic()))
        before_s = _busy_s(process)
        time.sleep(max(0.0, window[1] - time.monotonic()))
        busy_s = _busy_s(process) - before_s
        played, router = ray.get(sent), ray.get(heard)
        status = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, way).status.remote().result()
    trips_ms = np.concatenate([of.trips_ms for of in played])
    return {
        "replicas": load.replicas,
        "cores": os.cpu_count() or 1,
        "reports_per_s": len(trips_ms) / load.seconds,
        "refused": sum(of.refused for of in [*played, router]),
        "by_handle": json.loads(status.body)["direct"]["calls_by_handle"],
        "publications_per_s": router.publications / load.seconds,
        "core_share": busy_s / load.seconds,
        "us_per_report": busy_s / len(trips_ms) * 1e6 if len(trips_ms) else None,
        "players_core_share": sum(of.busy_s for of in [*played, router]) / load.seconds,
        **_percentiles("round_trip", trips_ms),
        **_percentiles("router_age", router.ages_ms),
    }


@contextmanager
def _cluster() -> Iterator[None]:
    """A Ray cluster of this benchmark's own."""
    # A token that another cluster has left must not count.
    before = os.environ.get(AUTH_VARIABLE)
    os.environ[AUTH_VARIABLE] = "disabled"
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
        )
        serve.start(http_options={"location": "NoServer"})
        yield
    finally:
        # With the cluster Serve ends too.
        ray.shutdown()
        if before is None:
            del os.environ[AUTH_VARIABLE]
        else:
            os.environ[AUTH_VARIABLE] = before


@contextmanager
def _controller(way: str) -> Iterator[psutil.Process]:
    """A controller in an application of that name, and the process that it runs in."""
    options = {"direct": {"enabled": way == "direct"}}
    app = fleet_controller.options(user_config=options).bind()
    serve.run(app, name=way, route_prefix=f"/{way}")
    yield _process_of(f"{way}:{CONTROLLER_DEPLOYMENT}")
    serve.delete(way)


def _process_of(replica: str) -> psutil.Process:
    """The child process of this one that runs the only replica of a deployment."""
    (found,) = [
        child
        for child in psutil.Process().children(recursive=True)
        if any(replica in word for word in child.cmdline())
    ]
    return found


def _busy_s(process: psutil.Process) -> float:
    """Processor time of all its threads, seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _percentiles(name: str, values_ms: Any) -> dict[str, float | None]:
    if not len(values_ms):
        return {f"{name}_p50_ms": None, f"{name}_p99_ms": None}
    p50, p99 = np.percentile(values_ms, [50, 99])
    return {f"{name}_p50_ms": float(p50), f"{name}_p99_ms": float(p99)}
