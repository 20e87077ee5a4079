"""Everything that can be known to be wrong with a Serve config file before it is deployed.

Nothing is checked by rules of its own where a builder, a model of Ray or an options class can
refuse it; added are unknown names, which Ray ignores, and relations between the applications,
which no builder sees together.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dps_autoscaling.checks import scaling_options
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from dps_deployments.app import build_controller, build_fleet, to_llm_config
from dps_deployments.config_file import ConfigFile, Problem, read_config_file
from dps_deployments.controller_client import CONTROLLER_DEPLOYMENT
from dps_deployments.fleet_args import FleetArgs, ingress_kwargs, parse_fleet_args
from dps_deployments.ingress_queue import share_of
from dps_deployments.options import deployment_faults, unknown_names
from dps_ray.config import DpsConfigError, faults_of
from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.fleet.publication import ControllerOptions, parse_controller_options

FLEET_BUILDER = "dps_deployments.app:build_fleet"
CONTROLLER_BUILDER = "dps_deployments.app:build_controller"


def validate_file(path: Path, *, with_model: bool = False) -> list[Problem]:
    """Find everything wrong with a config file for ``serve run`` or ``serve deploy``.

    Parameters
    ----------
    path
        The file.
    with_model
        Build the application as Serve would, which looks into the model's folder; a relative one
        counts from the working folder.

    Returns
    -------
    list of Problem
        In order of lines; empty when the file can be deployed.

    Raises
    ------
    DpsConfigError
        The file cannot be read, or is no YAML.
    """
    file = read_config_file(path)
    if not isinstance(file.document, Mapping):
        return [Problem(1, "the file is no mapping: it needs 'applications'")]
    problems = file.duplicates()
    for fault in _faults(file.document, with_model):
        problems.append(_located(file, fault))
    return sorted(set(problems), key=lambda problem: (problem.line, problem.text))


def _located(file: ConfigFile, fault: str) -> Problem:
    text = fault.removeprefix("file.")
    return Problem(file.line_of(_field(text)), text)


def _faults(document: Mapping[str, Any], with_model: bool) -> Iterator[str]:
    """Sentences that begin with ``file.`` and the dotted path of a field."""
    yield from unknown_names(ServeDeploySchema, _without_deployments(document), "file")
    try:
        ServeDeploySchema.model_validate(_without_deployments(document))
    except ValidationError as error:
        yield from faults_of(error, "file")
    applications = document.get("applications")
    fleets: dict[str, FleetArgs] = {}
    controllers: dict[str, tuple[str, ControllerOptions]] = {}
    for index, app in enumerate(applications if isinstance(applications, list) else ()):
        if not isinstance(app, Mapping):
            continue
        where = f"file.applications.{index}"
        found: list[str] = []
        args = app.get("args", {})
        if app.get("import_path") == FLEET_BUILDER:
            fleet, found = _fleet(args, with_model)
            if fleet is not None:
                fleets[where] = fleet
        elif app.get("import_path") == CONTROLLER_BUILDER:
            options, found = _controller(app)
            if options is not None:
                controllers[str(app.get("name"))] = where, options
        yield from (f"{where}.{fault}" for fault in found)
        overrides = app.get("deployments")
        for number, override in enumerate(overrides if isinstance(overrides, list) else ()):
            if isinstance(override, Mapping):
                yield from deployment_faults(override, f"{where}.deployments.{number}")
    for where, fleet in fleets.items():
        yield from _relations(where, fleet, controllers)
        yield from _timeouts(where, fleet, document.get("http_options"))


def _without_deployments(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document less what ``deployment_faults`` looks at."""
    applications = document.get("applications")
    if not isinstance(applications, list):
        return dict(document)
    return {
        **document,
        "applications": [
            {name: value for name, value in app.items() if name != "deployments"}
            if isinstance(app, Mapping)
            else app
            for app in applications
        ],
    }


def _fleet(args: Any, with_model: bool) -> tuple[FleetArgs | None, list[str]]:
    """The arguments of a fleet, as far as they can be read, and what is wrong with them."""
    if not isinstance(args, dict):
        return None, [f"args is {args!r}: give a mapping"]
    faults: list[str] = []
    try:
        fleet = parse_fleet_args(args)
    except DpsConfigError as error:
        faults += error.faults
        given = args.get("llm_config")
        if not isinstance(given, dict) or not isinstance(given.get("engine_kwargs", {}), dict):
            return None, faults
        # Without the parts already found wrong, so that the rest can be looked at.
        wrong = {_field(fault).split(".")[1] for fault in faults}
        engine = {k: v for k, v in given.get("engine_kwargs", {}).items() if k not in _CHECKED}
        safe = {**given, "engine_kwargs": engine, "deployment_config": _SAFE_DEPLOYMENT}
        others = {name: args[name] for name in args if name not in wrong}
        try:
            fleet = FleetArgs.model_validate({**others, "llm_config": safe})
        except ValidationError:
            return None, faults
    faults += _llm_faults(fleet)
    if with_model and not faults:
        try:
            build_fleet(args)
        except DpsConfigError as error:
            faults += error.faults
    return fleet, faults


_CHECKED = ("additional_config", "quantization")
_SAFE_DEPLOYMENT = {"max_ongoing_requests": 1}


def _field(fault: str) -> str:
    """The dotted path a fault begins with."""
    return fault.split(" ", 1)[0].rstrip(":")


def _llm_faults(fleet: FleetArgs) -> list[str]:
    """Build the real ``LLMConfig``, and again without the names it does not know: they hide the
    faults of later stages."""
    faults: list[str] = []
    while True:
        try:
            to_llm_config(fleet)
            return faults
        except DpsConfigError as error:
            faults += error.faults
            known = _without_unknown(fleet.llm_config, error.faults)
        if known == {"engine_kwargs": {}, **fleet.llm_config}:
            return faults
        fleet = fleet.model_copy(update={"llm_config": known})


def _without_unknown(llm_config: dict[str, Any], faults: Iterable[str]) -> dict[str, Any]:
    known = {**llm_config, "engine_kwargs": dict(llm_config.get("engine_kwargs", {}))}
    for fault in faults:
        _, _, *path = _field(fault).split(".")
        if "is not an option" not in fault or not path:
            continue
        if path[0] == "engine_kwargs" and len(path) == 2:
            known["engine_kwargs"].pop(path[1], None)
        else:
            known.pop(path[0], None)
    return known


def _controller(app: Mapping[str, Any]) -> tuple[ControllerOptions | None, list[str]]:
    faults: list[str] = []
    try:
        build_controller(app.get("args", {}))
    except DpsConfigError as error:
        faults += error.faults
    options: ControllerOptions | None = ControllerOptions()
    overrides = app.get("deployments")
    for number, override in enumerate(overrides if isinstance(overrides, list) else ()):
        where = f"deployments.{number}"
        if not isinstance(override, Mapping):
            continue
        if override.get("name") != CONTROLLER_DEPLOYMENT:
            faults.append(
                f"{where}.name is {override.get('name')!r}: the only deployment of this "
                f"application is {CONTROLLER_DEPLOYMENT}"
            )
            continue
        try:
            options = parse_controller_options(override.get("user_config"))
        except DpsConfigError as error:
            options = None
            faults += [f"{where}.{fault}" for fault in error.faults]
    return options, faults


def _relations(
    where: str, fleet: FleetArgs, controllers: Mapping[str, tuple[str, ControllerOptions]]
) -> Iterator[str]:
    """Relations between a fleet and its controller: reports, ageing, queue, leases, size."""
    if fleet.controller_app not in controllers:
        yield (
            f"{where}.args.controller_app is {fleet.controller_app!r}: no application of that name "
            f"has import_path {CONTROLLER_BUILDER} (and a valid configuration)"
        )
        return
    _, controller = controllers[fleet.controller_app]
    heartbeat_s, stale_s = fleet.report.heartbeat_s, controller.ageing.stale_after_s
    if heartbeat_s >= stale_s:
        yield (
            f"{where}.args.report.heartbeat_s is {heartbeat_s:g}: it must be below the "
            f"controller's ageing.stale_after_s ({stale_s:g}), or every replica is stale between "
            "two heartbeats; a third of it is a good value"
        )
    yield from _admission(where, fleet, controller.admission)
    deployment = fleet.llm_config.get("deployment_config") or {}
    scaling = scaling_options(deployment.get("autoscaling_config"))
    ttl_s = controller.leases.ttl_s
    if scaling is not None and controller.leases.enabled and scaling.calm_s <= ttl_s:
        yield (
            f"{where}.args.llm_config.deployment_config.autoscaling_config.policy.policy_kwargs."
            f"calm_s is {scaling.calm_s:g}: it must be above the controller's leases.ttl_s "
            f"({ttl_s:g}), or a replica would be stopped while it may begin to restore"
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
