"""Checks of Serve's own options: Ray takes unknown names in silence and impossible values late."""

import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from dps_autoscaling.checks import autoscaling_faults
from pydantic import BaseModel, ValidationError
from ray.serve.schema import DeploymentSchema

from dps_deployments.late_refusals import runtime_env_faults
from dps_ray.choices import nearest
from dps_ray.faults import faults_of

MAX_HEALTH_CHECK_PERIOD_S = 10.0


def deployment_faults(
    options: Mapping[str, Any], where: str, known: Collection[str] = DeploymentSchema.model_fields
) -> list[str]:
    """What is wrong with the options of one deployment.

    Parameters
    ----------
    options
        Serve options as a config file gives them.
    where
        Dotted path of ``options``, for the messages.
    known
        Names that may be used here.
    """
    unknown = sorted(options.keys() - set(known), key=str)
    faults = [
        f"{where}.{name} is not an option: {nearest(name, known)}remove it or correct its spelling "
        f"(known: {', '.join(sorted(known))})"
        for name in unknown
    ]
    autoscaling = options.get("autoscaling_config")
    replicas = options.get("num_replicas")
    wrong = not (replicas in (None, "auto") or (type(replicas) is int and replicas > 0))
    if wrong:
        # Serve would answer with each type that it might have been.
        faults.append(
            f"{where}.num_replicas is {replicas!r}: give a whole number of at least 1, or 'auto'"
        )
    values = {
        "name": "deployment",
        **{name: value for name, value in options.items() if name not in unknown},
    }
    if wrong:
        del values["num_replicas"]
    if isinstance(autoscaling, Mapping):
        del values["autoscaling_config"]
        faults += autoscaling_faults(autoscaling, f"{where}.autoscaling_config")
        if replicas not in (None, "auto"):
            faults.append(
                f"{where}.num_replicas is {replicas!r} beside autoscaling_config: "
                "remove one of the two"
            )
    period_s = options.get("health_check_period_s")
    if isinstance(period_s, int | float) and period_s > MAX_HEALTH_CHECK_PERIOD_S:
        faults.append(
            f"{where}.health_check_period_s is {period_s:g}: at most "
            f"{MAX_HEALTH_CHECK_PERIOD_S:g}, Serve's default: a dead replica is replaced only "
            "after three failed checks"
        )
    faults += unknown_names(DeploymentSchema, values, where)
    actor = options.get("ray_actor_options")
    env = actor.get("runtime_env") if isinstance(actor, Mapping) else None
    faults += runtime_env_faults(env, f"{where}.ray_actor_options.runtime_env")
    try:
        DeploymentSchema(**values)
    except ValidationError as error:
        faults += faults_of(error, where)
    return faults


def unknown_names(model: type[BaseModel], values: Any, where: str) -> list[str]:
    """Keys, at any depth, that a model which ignores unknown ones would ignore."""
    if not isinstance(values, Mapping):
        return []
    faults = []
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None:
            if model.model_config.get("extra") != "forbid":
                faults.append(
                    f"{where}.{name} is not an option: {nearest(name, model.model_fields)}remove "
                    "it or correct its spelling"
                )
            continue
        for inner in _models(field.annotation):
            entries = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for index, entry in entries:
                path = f"{where}.{name}" if index is None else f"{where}.{name}.{index}"
                faults += unknown_names(inner, entry, path)
    return faults


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Pydantic models that a field may hold, unless it may hold any mapping as well."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType):
        choices = get_args(annotation)
        if not any(choice is dict or get_origin(choice) is dict for choice in choices):
            for choice in choices:
                yield from _models(choice)
    elif get_origin(annotation) is list:
        yield from _models(get_args(annotation)[0])
