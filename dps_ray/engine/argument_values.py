"""What can be known to be wrong with an engine's arguments before there is a model.

vLLM's own types are asked: the annotation of each argument, and the bounds of the field of that
name in the configuration class that will hold it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from vllm import config
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.plugins import load_general_plugins

from dps_ray.choices import choose, nearest
from dps_ray.faults import faults_of

_HOLDERS = (
    config.ModelConfig,
    config.MultiModalConfig,
    config.LoadConfig,
    config.CacheConfig,
    config.UVAOffloadConfig,
    config.PrefetchOffloadConfig,
    config.ParallelConfig,
    config.SchedulerConfig,
    config.LoRAConfig,
    config.ObservabilityConfig,
)
"""Classes whose fields are named as the arguments are that they are made of."""
_BATCH = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
_BATCH_OPTIONS = ("enable_chunked_prefill", "long_prefill_token_threshold")
_DEFAULTS = {
    field.name: field.default
    for owner in (FrontendArgs, AsyncEngineArgs)
    for field in dataclasses.fields(owner)
}
_CONFIG = ConfigDict(arbitrary_types_allowed=True)


def argument_faults(arguments: Mapping[str, Any], where: str) -> list[str]:
    """Names and values that vLLM would refuse when a replica starts, one sentence each.

    Parameters
    ----------
    arguments
        Those of an engine and of its OpenAI front, by vLLM's names.
    where
        Dotted path of ``arguments``, for the messages.
    """
    # For names that only arg_utils's type checker sees.
    names = {**vars(arg_utils), "QuantizationConfigArgs": QuantizationConfigArgs}
    hints = get_type_hints(FrontendArgs, include_extras=True)
    hints |= get_type_hints(AsyncEngineArgs, names, include_extras=True)
    faults = []
    for name, value in arguments.items():
        if name in _DEFAULTS:
            faults += _faults(name, hints[name], value, f"{where}.{name}")
        else:
            faults.append(
                f"{where}.{name} is not an option of vLLM: {nearest(name, _DEFAULTS)}remove it or "
                "correct its spelling"
            )
    return faults or _relations(arguments, where)


def _relations(arguments: Mapping[str, Any], where: str) -> list[str]:
    """Relations that the scheduler's configuration checks, where nothing in them is a default that
    depends on the device."""
    given = {name: arguments.get(name) for name in _BATCH}
    if None in given.values():
        return []
    others = {name: arguments[name] for name in _BATCH_OPTIONS if arguments.get(name) is not None}
    try:
        config.SchedulerConfig(**given, **others, is_encoder_decoder=False)
    except ValidationError as error:
        return faults_of(error, where)
    return []


def _faults(name: str, hint: Any, value: Any, field: str) -> list[str]:
    if value is None and _DEFAULTS[name] in (None, dataclasses.MISSING):
        return []
    if name == "quantization" and isinstance(value, str):
        load_general_plugins()
        if value in QUANTIZATION_METHODS:
            return []
        return [f"{field} is {value!r}: {choose(value, QUANTIZATION_METHODS)}"]
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
    enums = [kind for kind in kinds if issubclass(kind, Enum)]
    if isinstance(value, str) and enums and str not in kinds:
        # vLLM takes the name of a member, in any case.
        members = list(enums[0].__members__)
        known = value.upper() in members
        return [] if known else [f"{field} is {value!r}: {choose(value.upper(), members)}"]
    for kind in (hint, *_bounds(name)) if value is not None else (hint,):
        try:
            read = _adapter(kind).validate_python(value)
        except ValidationError as error:
            return faults_of(error, field)
        # pydantic makes numbers of texts and of truth values, EngineArgs does not.
        if isinstance(value, str | bool) and isinstance(read, int | float) and read is not value:
            return [f"{field} is {value!r}: write {read!r}"]
    return []


def _bounds(name: str) -> Iterator[Any]:
    for holder in _HOLDERS:
        found = holder.__pydantic_fields__.get(name)
        if found is not None and found.metadata:
            yield Annotated[(found.annotation, *found.metadata)]


def _adapter(kind: Any) -> TypeAdapter[Any]:
    # A class with a configuration of its own takes no other.
    own = dataclasses.is_dataclass(kind)
    return TypeAdapter(kind) if own else TypeAdapter(kind, config=_CONFIG)


def known_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that vLLM has."""
    return {name: value for name, value in arguments.items() if name in _DEFAULTS}
