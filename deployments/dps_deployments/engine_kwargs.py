"""``engine_kwargs`` of a fleet's model, checked as far as no model is needed."""

from collections.abc import Mapping
from typing import Any

from dps_ray.config import DpsConfigError, parse_options
from dps_ray.engine.argument_values import argument_faults
from dps_ray.engine.refusals import graph_faults, refused_arguments

WHERE = "args.llm_config.engine_kwargs"
_GRAPHS = ("enforce_eager", "compilation_config", "optimization_level")
"""Arguments that decide whether CUDA graphs are captured, which is the default."""


def engine_faults(engine_kwargs: Mapping[str, Any], accelerator: Any) -> list[str]:
    """What would stop every replica at its start: names, values, features that DPS refuses.

    Parameters
    ----------
    engine_kwargs
        As given.
    accelerator
        ``accelerator_config`` of the model, as given.
    """
    faults = argument_faults(engine_kwargs, WHERE)
    if engine_kwargs.get("quantization") == "dps":
        kind = accelerator.get("kind") if isinstance(accelerator, Mapping) else None
        # Ray takes a model that names no accelerator for one on GPUs.
        faults += _dps_faults(engine_kwargs, cuda=kind in (None, "gpu"))
    return faults


def _dps_faults(arguments: Mapping[str, Any], *, cuda: bool) -> list[str]:
    compilation = arguments.get("compilation_config")
    inner = compilation if isinstance(compilation, Mapping) else {}
    asked = {**arguments, "cudagraph_mm_encoder": inner.get("cudagraph_mm_encoder")}
    faults = [
        f"{WHERE}.{name} is {asked[name]!r}, which does not go with quantization 'dps': {remedy}"
        for name, remedy in refused_arguments(asked, cuda=cuda).items()
    ]
    if cuda and not any(arguments.get(name) for name in _GRAPHS):
        try:
            options = parse_options(arguments.get("additional_config"))
        except DpsConfigError:
            return faults
        found = graph_faults(options, "CUDA graphs are captured by default")
        faults += [f"{WHERE}.{fault}" for fault in found]
    return faults
