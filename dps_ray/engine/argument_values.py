"""What can be known to be wrong with an engine's arguments before there is a model.

vLLM's own types are asked: the annotation of each argument, and the bounds of the field of that
name in the configuration class that will hold it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, get_type_hints

import torch
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

_EVERY_ENGINES = (
    config.ModelConfig,
    config.LoadConfig,
    config.CacheConfig,
    config.UVAOffloadConfig,
    config.PrefetchOffloadConfig,
    config.ParallelConfig,
    config.SchedulerConfig,
    config.ObservabilityConfig,
)
_HOLDERS = (*_EVERY_ENGINES, config.MultiModalConfig, config.LoRAConfig)
"""Classes whose fields are named as the arguments are that they are made of."""
_READERS: dict[str, tuple[Callable[[Any], Any], type[Enum]]] = {
    "attention_backend": (
        config.AttentionConfig.validate_backend_before,
        config.attention.AttentionBackendEnum,
    ),
    "mamba_backend": (config.MambaConfig.validate_backend_before, config.mamba.MambaBackendEnum),
}
"""How vLLM makes members of names, and whose."""
_COMPUTED = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "nnodes",
)
"""Numbers that Ray or EngineArgs computes with before a configuration class makes numbers of
texts."""
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
    # The length -1 is chosen by vLLM.
    if not all(isinstance(value, int) and value > 0 for value in given.values()):
        return []
    others = {name: arguments[name] for name in _BATCH_OPTIONS if arguments.get(name) is not None}
    try:
        config.SchedulerConfig(**given, **others, is_encoder_decoder=False)
    except ValidationError as error:
        found = faults_of(error, where)
    else:
        return []
    return [_with_field(fault, where, given | others) for fault in found]


def _with_field(fault: str, where: str, arguments: Mapping[str, Any]) -> str:
    """A relation of several arguments, led by the one that it names first."""
    relation = fault.removeprefix(f"{where}: ")
    named = [name for name in arguments if name in relation]
    if relation == fault or not named:
        return fault
    first = min(named, key=relation.index)
    return f"{where}.{first} is {arguments[first]!r}: {relation}"


def _faults(name: str, hint: Any, value: Any, field: str) -> list[str]:
    if value is None:
        kinds = [] if _DEFAULTS[name] in (None, dataclasses.MISSING) else _annotations(name)
    else:
        kinds = [hint, *_bounds(name)]
    if name == "dtype" and isinstance(value, torch.dtype):
        return []
    if name == "quantization" and isinstance(value, str):
        load_general_plugins()
        # vLLM reads any case, the plugin its own name alone.
        if value in QUANTIZATION_METHODS or value.lower() in {*QUANTIZATION_METHODS} - {"dps"}:
            return []
        return [f"{field} is {value!r}: {choose(value, QUANTIZATION_METHODS)}"]
    if name in _READERS and isinstance(value, str):
        read_name, members = _READERS[name]
        try:
            read_name(value)
        except (KeyError, ValueError):
            return [f"{field} is {value!r}: {choose(value.upper(), members.__members__)}"]
        return []
    for kind in kinds:
        try:
            read = _adapter(kind).validate_python(value)
        except ValidationError as error:
            return faults_of(error, field)
        if name in _COMPUTED and isinstance(value, str):
            return [f"{field} is {value!r}: write {read!r}"]
    return []


def _bounds(name: str) -> Iterator[Any]:
    for holder in _HOLDERS:
        found = holder.__pydantic_fields__.get(name)
        if found is not None and found.metadata:
            yield Annotated[(found.annotation, *found.metadata)]


def _annotations(name: str) -> list[Any]:
    """What holds the argument in every engine; the rest of vLLM takes None for not given."""
    found = [holder.__pydantic_fields__.get(name) for holder in _EVERY_ENGINES]
    return [field.annotation for field in found if field is not None]


def _adapter(kind: Any) -> TypeAdapter[Any]:
    # A class with a configuration of its own takes no other.
    own = dataclasses.is_dataclass(kind)
    return TypeAdapter(kind) if own else TypeAdapter(kind, config=_CONFIG)


def known_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that vLLM has."""
    return {name: value for name, value in arguments.items() if name in _DEFAULTS}
