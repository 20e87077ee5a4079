"""``args`` of a fleet's application, and everything in them that can be checked by itself."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dps_deployments.limits import RequestLimits
from dps_deployments.options import deployment_faults
from dps_ray.config import DpsConfigError, parse_options, refuse_stray_keys
from dps_ray.faults import faults_of
from dps_ray.fleet.reporting import ReportOptions

TIMEOUT_VARIABLE = "RAY_SERVE_LLM_ROUTER_HTTP_TIMEOUT"
"""Bounds a request in Ray's LLM ingress, whatever the HTTP options say; 600 s without it."""
DRAIN_MARGIN_S = 10.0
INGRESS_HEALTH_PERIOD_S = 1.0
"""Serve's own period, ten seconds, is how long a dead ingress would go unnoticed."""
INGRESS_DEPLOYMENT = "DpsIngress"
"""Name of the ingress's deployment: that of its class."""
DEPLOYMENT_OPTIONS = {
    "name",
    "num_replicas",
    "ray_actor_options",
    "max_ongoing_requests",
    "max_queued_requests",
    "autoscaling_config",
    "user_config",
    "health_check_period_s",
    "health_check_timeout_s",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
    "logging_config",
    "request_router_config",
}
ENGINE_KWARGS = "args.llm_config.engine_kwargs"
"""Dotted path of the engine's arguments, for messages."""


class FleetArgs(BaseModel):
    """``args`` of an application whose ``import_path`` is ``dps_deployments.app:build_fleet``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    llm_config: dict[str, Any]
    """``ray.serve.llm.LLMConfig``. The builder adds server class and request router to it."""
    ingress: dict[str, Any] = {}
    """Serve options of the OpenAI-compatible ingress deployment."""
    controller_app: str = "dps-controller"
    """Application the fleet controller is deployed in."""
    report: ReportOptions = ReportOptions()
    """How often replicas look at their engines and report."""
    limits: RequestLimits = RequestLimits()
    """Bounds on what one request may bring."""
    request_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    """Longest time until a request's answer begins, seconds; one that does not stream begins with
    its end. Give ``http_options.request_timeout_s`` the same value: it bounds streams too."""

    @property
    def drain_s(self) -> float:
        """How long a replica that stops lets its requests end, where no other time is given."""
        return self.request_timeout_s + DRAIN_MARGIN_S


def parse_fleet_args(args: dict[str, Any]) -> FleetArgs:
    """Read ``args`` and check everything in them that needs no file and no device.

    Raises
    ------
    DpsConfigError
        One line for each wrong field.
    """
    faults: list[str] = []
    try:
        fleet = FleetArgs.model_validate(args)
    except ValidationError as error:
        faults += faults_of(error, "args")
    given = args.get("llm_config")
    if isinstance(given, dict):
        faults += _engine_faults(given.get("engine_kwargs", {}))
        faults += _replica_faults(given.get("deployment_config", {}))
    limits = args.get("limits")
    if isinstance(given, dict) and (limits is None or isinstance(limits, dict)):
        faults += _context_faults(given.get("engine_kwargs", {}), limits or {})
    ingress = args.get("ingress", {})
    if isinstance(ingress, dict):
        faults += deployment_faults(ingress, "args.ingress")
        faults += _ingress_faults(ingress)
        if TIMEOUT_VARIABLE in _env_vars(ingress):
            faults.append(
                f"args.ingress.ray_actor_options.runtime_env.env_vars.{TIMEOUT_VARIABLE} is set: "
                "remove it and give args.request_timeout_s"
            )
    if faults:
        raise DpsConfigError(*faults)
    return fleet


def ingress_options(fleet: FleetArgs) -> dict[str, Any]:
    """Serve options of the ingress, which learns the longest request from its environment."""
    actor = fleet.ingress.get("ray_actor_options") or {}
    drain = {"graceful_shutdown_timeout_s": fleet.drain_s}
    variables = {**_env_vars(fleet.ingress), TIMEOUT_VARIABLE: f"{fleet.request_timeout_s:g}"}
    runtime_env = {**(actor.get("runtime_env") or {}), "env_vars": variables}
    return {
        "health_check_period_s": INGRESS_HEALTH_PERIOD_S,
        **drain,
        **fleet.ingress,
        "ray_actor_options": {**actor, "runtime_env": runtime_env},
    }


def ingress_kwargs(fleet: FleetArgs) -> dict[str, Any]:
    """What the ingress is told about its fleet."""
    engine = fleet.llm_config.get("engine_kwargs") or {}
    replicas = fleet.ingress.get("num_replicas")
    return {
        "limits": fleet.limits.for_context(engine.get("max_model_len")),
        "priorities": engine.get("scheduling_policy") == "priority",
        "ingress_replicas": replicas if isinstance(replicas, int) else 1,
    }


def override_faults(args: Any, override: Mapping[str, Any], where: str) -> list[str]:
    """Refuse an entry of the application's ``deployments`` that changes the ingress past its args.

    It would scale the ingress, or replace its environment, while its queue goes on sharing the
    places of the fleet by ``args.ingress``.

    Parameters
    ----------
    args
        ``args`` of the application.
    override
        The entry.
    where
        Its dotted path, for the messages.
    """
    ingress = args.get("ingress") if isinstance(args, Mapping) else None
    named = ingress.get("name") if isinstance(ingress, Mapping) else None
    name = override.get("name")
    if name != (named or INGRESS_DEPLOYMENT):
        return []
    return [
        f"{where}.name is {name!r}: options of the ingress under deployments do not reach its "
        "queue, which shares the replicas' places by their number; move them to args.ingress"
    ]


def _ingress_faults(ingress: dict[str, Any]) -> list[str]:
    """Each ingress replica fills its share of the places, so their number must be known."""
    remedy = "each ingress replica takes a share of the places: give num_replicas, a whole number"
    faults = [
        f"args.ingress.{name} is {ingress[name]!r}: {remedy}"
        for name in ("autoscaling_config", "num_replicas")
        if ingress.get(name) is not None and not isinstance(ingress[name], int)
    ]
    if "max_ongoing_requests" not in ingress:
        faults.append(
            "args.ingress.max_ongoing_requests is not set: Ray's default is no limit at all, and "
            "so none on bodies that arrive; give the requests that one ingress replica may hold, "
            "in its queue and on the replicas"
        )
    return faults


def _context_faults(engine_kwargs: Any, limits: dict[str, Any]) -> list[str]:
    """Prompts are bounded before they are tokenised, so their bound must be in the config."""
    if not isinstance(engine_kwargs, dict):
        return []
    length = engine_kwargs.get("max_model_len")
    if (isinstance(length, int) and length > 0) or limits.get("max_prompt_tokens") is not None:
        return []
    return [
        f"{ENGINE_KWARGS}.max_model_len is {length!r}: nothing but the body's size "
        "would bound a prompt before it is tokenised; give a number of tokens here, or "
        "args.limits.max_prompt_tokens"
    ]


def _env_vars(options: dict[str, Any]) -> dict[str, str]:
    """Environment variables in the Serve options of a deployment, where they are well-formed."""
    value: Any = options
    for name in ("ray_actor_options", "runtime_env", "env_vars"):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _engine_faults(engine_kwargs: Any) -> list[str]:
    where = ENGINE_KWARGS
    if not isinstance(engine_kwargs, dict):
        return [f"{where} is {engine_kwargs!r}: give a mapping, or leave it out"]
    additional = engine_kwargs.get("additional_config") or {}
    quantization = engine_kwargs.get("quantization")
    faults: list[str] = []
    # Of an engine without DPS, the other keys are other plugins'.
    for check in (refuse_stray_keys, parse_options) if quantization == "dps" else (parse_options,):
        try:
            check(additional)
        except DpsConfigError as error:
            faults += [f"{where}.{fault}" for fault in error.faults]
    policy = engine_kwargs.get("scheduling_policy", "fcfs")
    if policy not in ("fcfs", "priority"):
        faults.append(
            f"{where}.scheduling_policy is {policy!r}: give 'priority', so that requests may say "
            "how urgent they are, or 'fcfs' for the order of arrival"
        )
    if isinstance(additional, dict) and "dps" in additional and quantization != "dps":
        faults.append(
            f"{where}.quantization is {quantization!r} while "
            "additional_config.dps is given: set quantization to 'dps', or remove the options"
        )
    return faults


def _replica_faults(deployment_config: Any) -> list[str]:
    where = "args.llm_config.deployment_config"
    if not isinstance(deployment_config, dict):
        return [f"{where} is {deployment_config!r}: give a mapping with max_ongoing_requests"]
    faults = deployment_faults(deployment_config, where, DEPLOYMENT_OPTIONS)
    if "max_ongoing_requests" not in deployment_config:
        faults.append(
            f"{where}.max_ongoing_requests is not set: Ray's default is no limit at all; give the "
            "number of requests one replica may hold, running and waiting"
        )
    return faults
