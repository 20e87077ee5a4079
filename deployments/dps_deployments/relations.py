"""Relations between a fleet, its controller and Serve's proxy, which no builder sees together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dps_autoscaling.checks import scaling_options

from dps_deployments.fleet_args import FleetArgs, ingress_kwargs
from dps_deployments.ingress_queue import share_of
from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.fleet.aggregate import AggregateOptions
from dps_ray.fleet.leases import LeaseOptions
from dps_ray.fleet.publication import ControllerOptions


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a controller's configuration in spite of its faults."""

    options: ControllerOptions | None
    wrong: frozenset[str] = frozenset()
    """Sections that are wrong: their values in ``options`` are defaults and say nothing."""

    def section(self, name: str) -> Any:
        """A section that can be trusted, else ``None``."""
        return None if self.options is None or name in self.wrong else getattr(self.options, name)


Controllers = dict[str, Known]
"""Controllers by the names of their applications."""


def fleet_relations(
    where: str,
    fleet: FleetArgs,
    controllers: Controllers,
    http_options: Any,
    overrides: Any,
) -> Iterator[str]:
    """Sentences about what does not fit together.

    Parameters
    ----------
    where
        Dotted path of the fleet's application.
    fleet
        Its arguments.
    controllers
        All controllers of the file.
    http_options
        Those of the file, as given.
    overrides
        ``deployments`` of the fleet's application, as given.
    """
    yield from _timeouts(where, fleet, http_options)
    yield from _drain(where, fleet, overrides)
    controller = controllers.get(fleet.controller_app)
    if controller is None:
        yield (
            f"{where}.args.controller_app is {fleet.controller_app!r}: no application of that name "
            "has import_path dps_deployments.app:build_controller"
        )
        return
    ageing, leases = controller.section("ageing"), controller.section("leases")
    admission = controller.section("admission")
    if ageing is not None:
        yield from _freshness(where, fleet, ageing)
    if admission is not None:
        yield from _admission(where, fleet, admission)
    if leases is not None:
        yield from _leases(where, fleet, leases)


def _freshness(where: str, fleet: FleetArgs, ageing: AggregateOptions) -> Iterator[str]:
    report = fleet.report
    age_s = report.heartbeat_s + report.poll_period_s + ageing.publish_period_s
    if age_s >= ageing.stale_after_s:
        yield (
            f"{where}.args.report.heartbeat_s is {report.heartbeat_s:g}: with poll_period_s "
            f"({report.poll_period_s:g}) and the controller's ageing.publish_period_s "
            f"({ageing.publish_period_s:g}) it must be below the controller's ageing.stale_after_s "
            f"({ageing.stale_after_s:g}), or every replica is stale between two heartbeats; a "
            "third of it is a good value"
        )


def _leases(where: str, fleet: FleetArgs, leases: LeaseOptions) -> Iterator[str]:
    """The fleet's dwell: a replica is stopped only when its lease must have run out.

    An engine's own ``min_fast_dwell_s`` may be shorter than a lease: the replica gives the lease
    back with the report that it is done, so no lease outlives the stay that it was granted in.
    """
    deployment = fleet.llm_config.get("deployment_config") or {}
    scaling = scaling_options(deployment.get("autoscaling_config"))
    if scaling is not None and leases.enabled and scaling.calm_s <= leases.ttl_s:
        yield (
            f"{where}.args.llm_config.deployment_config.autoscaling_config.policy.policy_kwargs."
            f"calm_s is {scaling.calm_s:g}: it must be above the controller's leases.ttl_s "
            f"({leases.ttl_s:g}), or a replica would be stopped while it may begin to restore"
        )


def _drain(where: str, fleet: FleetArgs, overrides: Any) -> Iterator[str]:
    """A replica that stops, and the ingress that streams for it, outlive the longest request."""
    given = [
        (f"{where}.args.llm_config.deployment_config", fleet.llm_config.get("deployment_config")),
        (f"{where}.args.ingress", fleet.ingress),
    ]
    if isinstance(overrides, list):
        given += [(f"{where}.deployments.{n}", override) for n, override in enumerate(overrides)]
    for path, options in given:
        drain_s = options.get("graceful_shutdown_timeout_s") if isinstance(options, dict) else None
        if isinstance(drain_s, int | float) and drain_s <= fleet.request_timeout_s:
            yield (
                f"{path}.graceful_shutdown_timeout_s is {drain_s:g}: it must be above "
                f"args.request_timeout_s ({fleet.request_timeout_s:g}), or a replica that stops "
                "cuts the streams it still has; leave it out for 10 s more than that"
            )


def _admission(where: str, fleet: FleetArgs, admission: AdmissionOptions) -> Iterator[str]:
    """The queue must be what is full first, and a refusal of its own must come first too."""
    for name in ("full_wait_s", "no_replica_wait_s", "queue_wait_s"):
        wait_s: float = getattr(admission, name)
        if wait_s >= fleet.request_timeout_s:
            yield (
                f"{where}.args.request_timeout_s is {fleet.request_timeout_s:g}: it must be above "
                f"the controller's admission.{name} ({wait_s:g}), or requests end with 408 instead "
                "of the 503 that says when to come back"
            )
    room = fleet.ingress.get("max_ongoing_requests")
    deployment = fleet.llm_config.get("deployment_config") or {}
    replicas = (deployment.get("autoscaling_config") or {}).get("max_replicas")
    replicas = replicas or deployment.get("num_replicas") or 1
    places = deployment.get("max_ongoing_requests")
    if not (isinstance(room, int) and isinstance(replicas, int) and isinstance(places, int)):
        return
    share = share_of(replicas * places, ingress_kwargs(fleet)["ingress_replicas"])
    needed = share + 2 * admission.max_waiting
    if room <= needed:
        yield (
            f"{where}.args.ingress.max_ongoing_requests is {room}: it must be above {needed}, the "
            f"requests that it may have on {replicas} replicas ({share}) and twice the "
            f"controller's admission.max_waiting ({admission.max_waiting}), for those in the queue "
            "and those that pass it, or the queue is never full and urgent requests wait before it "
            "with all others"
        )


def _timeouts(where: str, fleet: FleetArgs, http_options: Any) -> Iterator[str]:
    """The proxy and the ingress each end a request: the two must agree on when."""
    proxy_s = http_options.get("request_timeout_s") if isinstance(http_options, Mapping) else None
    if isinstance(proxy_s, int | float) and proxy_s != fleet.request_timeout_s:
        yield (
            f"{where}.args.request_timeout_s is {fleet.request_timeout_s:g} and "
            f"http_options.request_timeout_s is {proxy_s:g}: a request ends at the smaller of the "
            "two; give both the same value"
        )
