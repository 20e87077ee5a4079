"""``engine_kwargs`` of a fleet's model, checked as far as no model is needed."""

from collections.abc import Mapping
from typing import Any

from dps_deployments.fleet_args import ENGINE_KWARGS
from dps_ray.config import DpsConfigError, parse_options
from dps_ray.engine.argument_values import argument_faults
from dps_ray.engine.refusals import graph_faults, refused_arguments


def engine_faults(engine_kwargs: Mapping[str, Any], accelerator: str | None) -> list[str]:
    """What would stop every replica at its start: names, values, features that DPS refuses.

    Parameters
    ----------
    engine_kwargs
        As given.
    accelerator
        Kind of the model's accelerator, as Ray found it; None where it could not.
    """
    faults = argument_faults(engine_kwargs, ENGINE_KWARGS)
    if engine_kwargs.get("quantization") == "dps":
        faults += _dps_faults(engine_kwargs, cuda=accelerator == "gpu")
    return faults


def _dps_faults(arguments: Mapping[str, Any], *, cuda: bool) -> list[str]:
    compilation = arguments.get("compilation_config")
    inner = compilation if isinstance(compilation, Mapping) else {}
    asked = {**arguments, "cudagraph_mm_encoder": inner.get("cudagraph_mm_encoder")}
    faults = [
        f"{ENGINE_KWARGS}.{name} is {asked[name]!r}, which does not go with quantization 'dps': "
        f"{remedy}"
        for name, remedy in refused_arguments(asked, cuda=cuda).items()
    ]
    if cuda and _captures_by_default(arguments):
        try:
            options = parse_options(arguments.get("additional_config"))
        except DpsConfigError:
            return faults
        found = graph_faults(options, "CUDA graphs are captured by default")
        faults += [f"{ENGINE_KWARGS}.{fault}" for fault in found]
    return faults


def _captures_by_default(arguments: Mapping[str, Any]) -> bool:
    """Whether no argument decides about CUDA graphs; the optimization level 0 does."""
    return (
        not arguments.get("enforce_eager")
        and not arguments.get("compilation_config")
        and arguments.get("optimization_level") is None
    )
