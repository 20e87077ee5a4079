"""Builders that ``serve run`` and ``serve deploy`` import: they check everything, then build."""

from pathlib import Path
from typing import Any, TypeGuard

from dps_autoscaling.ray_version import require_supported_ray
from pydantic import ValidationError
from ray.serve import Application

from dps_deployments.fleet_args import (
    ENGINE_KWARGS,
    FleetArgs,
    ingress_kwargs,
    ingress_options,
    parse_fleet_args,
)
from dps_deployments.late_refusals import runtime_env_faults
from dps_deployments.revision import revision
from dps_ray.config import DpsConfigError, parse_options
from dps_ray.engine.preflight import preflight
from dps_ray.engine.vllm_version import require_supported_vllm
from dps_ray.faults import faults_of

ROUTER_CLASS = "dps_deployments.router.DpsRouter"
ROUTING_STATS_PERIOD_S = 1.0
QUEUE_FACTOR = 8
"""Requests that may wait at one ingress replica, per request that one replica may hold."""
PREFLIGHT_OPTIONS = (
    "dtype",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "block_size",
)


def build_controller(args: dict[str, Any]) -> Application:
    """Application with the fleet controller.

    It takes no arguments: everything about it is its deployment's ``user_config``, which can be
    changed while it runs.

    Raises
    ------
    DpsConfigError
        On any argument, or an unsupported Ray.
    """
    require_supported_ray()
    if args:
        raise DpsConfigError(
            f"args is {args!r}: the controller takes none; put its settings under "
            "deployments[].user_config"
        )
    from dps_deployments.controller import fleet_controller

    return fleet_controller.bind()


def build_fleet(args: dict[str, Any]) -> Application:
    """Application with the replicas of one model behind the OpenAI-compatible API.

    Parameters
    ----------
    args
        Fields of ``FleetArgs``.

    Raises
    ------
    DpsConfigError
        One line that names the field, the value and the remedy, before any replica starts.
    """
    require_supported_ray()
    require_supported_vllm()
    from ray.serve.llm import build_openai_app

    from dps_deployments.ingress import DpsIngress

    fleet = parse_fleet_args(args)
    llm_config = to_llm_config(fleet)
    check_model_source(llm_config.model_loading_config.model_source)
    _preflight(llm_config.model_loading_config.model_source, llm_config.engine_kwargs)
    return build_openai_app(
        {
            "llm_configs": [llm_config],
            "ingress_cls_config": {
                "ingress_cls": DpsIngress,
                "ingress_extra_kwargs": ingress_kwargs(fleet),
            },
            "ingress_deployment_config": ingress_options(fleet),
        }
    )


def to_llm_config(fleet: FleetArgs) -> Any:
    """Build Ray's ``LLMConfig`` with the fleet's server and router.

    Raises
    ------
    DpsConfigError
        When Ray or vLLM would refuse an option, or an elastic engine a feature.
    """
    from ray.serve.llm import LLMConfig, ModelLoadingConfig

    from dps_deployments.engine_kwargs import engine_faults
    from dps_deployments.server import FLEET_CONFIG_KEY, DpsLLMServer, ServerFleetOptions
    from dps_ray.engine.argument_values import known_arguments

    given = fleet.llm_config
    engine_kwargs = given.get("engine_kwargs", {})
    options = ServerFleetOptions(controller_app=fleet.controller_app, report=fleet.report)
    router = {
        "request_router_class": ROUTER_CLASS,
        "request_router_kwargs": {
            "controller_app": fleet.controller_app,
            "revision": revision(),
        },
        "request_routing_stats_period_s": ROUTING_STATS_PERIOD_S,
    }
    deployment = given.get("deployment_config", {})
    bounds = {"max_queued_requests": QUEUE_FACTOR * deployment["max_ongoing_requests"]}
    values = {
        **given,
        "engine_kwargs": known_arguments(engine_kwargs),
        "server_cls": given.get("server_cls", DpsLLMServer),
        "model_loading_config": _with_absolute_source(given.get("model_loading_config")),
        "deployment_config": {
            "request_router_config": router,
            "graceful_shutdown_timeout_s": fleet.drain_s,
            **bounds,
            **deployment,
        },
        "experimental_configs": {
            **given.get("experimental_configs", {}),
            FLEET_CONFIG_KEY: options.model_dump(mode="json"),
        },
    }
    faults = runtime_env_faults(given.get("runtime_env"), "args.llm_config.runtime_env")
    try:
        ModelLoadingConfig.model_validate(values["model_loading_config"])
    except ValidationError as error:
        faults += faults_of(error, "args.llm_config.model_loading_config")
        # LLMConfig would only repeat that it is invalid.
        values["model_loading_config"] = {"model_id": "unknown"}
    kind = None
    try:
        llm_config = LLMConfig(**values)
        kind = llm_config.accelerator_config.kind
        # Ray splits the engine's options and checks their relations to its own only here.
        llm_config.get_engine_config().get_initialization_kwargs()
    except ValidationError as error:
        faults += faults_of(error, "args.llm_config")
    except ImportError as error:
        faults.append(f"args.llm_config.server_cls is {given.get('server_cls')!r}: {error}")
    except ValueError as error:
        faults.append(f"{ENGINE_KWARGS}: {error}")
    faults += engine_faults(engine_kwargs, kind)
    if faults:
        raise DpsConfigError(*faults)
    return llm_config


def check_model_source(source: Any) -> None:
    """Refuse a model folder that is not there; a Hub id or a remote address passes.

    Raises
    ------
    DpsConfigError
        With the folder as this process sees it.
    """
    if not _is_folder(source):
        return
    folder = Path(source).expanduser()
    if not (folder / "config.json").is_file():
        raise DpsConfigError(
            f"args.llm_config.model_loading_config.model_source is {source!r}: there is no "
            "config.json in that folder; make the model first (`dps-ray models prepare`), start "
            "Serve in the folder the path is relative to, or give a Hugging Face id"
        )


def _preflight(source: Any, engine_kwargs: dict[str, Any]) -> None:
    """Look into a local model for what would stop every replica after it has loaded."""
    if engine_kwargs.get("quantization") != "dps" or not isinstance(source, str):
        return
    given = {name: engine_kwargs[name] for name in PREFLIGHT_OPTIONS if name in engine_kwargs}
    preflight(source, options=parse_options(engine_kwargs.get("additional_config")), **given)


def _is_folder(source: Any) -> TypeGuard[str]:
    return isinstance(source, str) and source.startswith((".", "/", "~"))


def _with_absolute_source(model_loading_config: Any) -> Any:
    """Make a relative model folder absolute: replicas run in folders of their own."""
    if not isinstance(model_loading_config, dict):
        return model_loading_config
    source = model_loading_config.get("model_source")
    if not _is_folder(source):
        return model_loading_config
    return {**model_loading_config, "model_source": str(Path(source).expanduser().absolute())}
