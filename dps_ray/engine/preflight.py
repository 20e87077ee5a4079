"""Finds out from a model folder, before anything is started, whether an engine can serve it.

Workers refuse the same things, but only after they have loaded the model. Sizes are computed as
vLLM would shard and stack the weights; a layer that no format fits makes the real residual
smaller, which only a full load can tell.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.engine.checkpoint import Checkpoint, Weight
from dps_ray.engine.kept_whole import reason_to_keep
from dps_ray.engine.rank_section import MAX_LAYERS, MAX_UNITS
from dps_ray.memory.arena import ALIGNMENT_BYTES
from dps_ray.memory.drivers import DriverKind, planned_granularity_bytes
from dps_ray.memory.geometry import Geometry, plan_geometry
from dps_ray.precision.encode import choose

logger = logging.getLogger("vllm.dps")

_SERVED = {
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
# vLLM serves a float32 checkpoint in its preferred 16-bit type.
_STORED = {"F16": "float16", "BF16": "bfloat16", "F32": "bfloat16", "F64": "bfloat16"}
DEFAULT_BLOCK_TOKENS = 128
CUDA_BLOCK_TOKENS = 16
LATENT_BLOCK_TOKENS = 16
"""vLLM's plain CPU kernel for latent attention is built for this block size only; its AMX kernel
cannot read the elastic KV cache."""

# With no KV size given, vLLM takes a share of the machine: enough that only options can be wrong.
_AMPLE_KV_BYTES = 1 << 50


@dataclass(frozen=True)
class Preflight:
    """What one rank of the engine will look like."""

    eligible: str
    """A layer that a nested format fits."""
    residual_bytes: int
    """Lower bytes of all layers that may be split."""
    block_bytes: int | None
    """One KV block over all layers; ``None`` where layers differ in what they cache."""
    geometry: Geometry | None
    """``None`` without ``block_bytes`` or a KV size."""


def preflight(
    model: str,
    *,
    options: DpsOptions,
    dtype: str | None = None,
    kv_cache_memory_bytes: int | None = None,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    block_size: int | None = None,
    kind: DriverKind = "host",
) -> Preflight | None:
    """Check a model folder against the options of the engine that is to serve it.

    Parameters
    ----------
    model
        Model folder or Hugging Face id. An id is not looked up: there is nothing to check here.
    options
        The engine's ``additional_config.dps``.
    dtype, kv_cache_memory_bytes, kv_cache_dtype, tensor_parallel_size, block_size
        vLLM's engine arguments of these names; ``None`` where they are left out.
    kind
        Driver of the device that will serve the model.

    Returns
    -------
    Preflight or None
        ``None`` where ``model`` is no folder with safetensors.

    Raises
    ------
    DpsConfigError
        One line that names the field, the value and the remedy.
    """
    folder = _folder(model)
    if folder is None:
        logger.info("model %r is no local folder: it is checked when its weights are loaded", model)
        return None
    try:
        checkpoint = Checkpoint.open(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise DpsConfigError(
            f"model {model!r} cannot be read ({error}): make or download the folder again"
        ) from None
    served = _served_dtype(model, checkpoint, dtype)
    if not checkpoint.weights:
        logger.info("model %r has no safetensors: it is checked when its weights are loaded", model)
        return None
    _refuse_quantized(model, checkpoint)
    layers = _splittable(checkpoint, tensor_parallel_size, options.min_split_bytes)
    if not layers:
        raise DpsConfigError(
            f"additional_config.dps.min_split_bytes is {options.min_split_bytes}: no layer of "
            f"model {model!r} is that large; lower it"
        )
    eligible = _find_eligible(model, layers, served, options.formats)
    residual_bytes = sum(layer.residual_bytes for layer in layers)
    if checkpoint.multimodal or not checkpoint.uniform_attention:
        logger.info("model %r: layers differ in what they cache, memory is planned at load", model)
        return Preflight(eligible, residual_bytes, None, None)
    block_bytes = checkpoint.kv_block_bytes(
        _block_tokens(checkpoint, block_size, kind),
        tensor_parallel_size,
        1 if kv_cache_dtype.startswith("fp8") else served.itemsize,
    )
    geometry = plan_geometry(
        kv_bytes=_AMPLE_KV_BYTES if kv_cache_memory_bytes is None else kv_cache_memory_bytes,
        residual_bytes=residual_bytes,
        block_bytes=block_bytes,
        granularity_bytes=planned_granularity_bytes(kind),
        unit_bytes=options.unit_bytes,
        lend=options.lend,
    )
    require_few_units(geometry)
    return Preflight(
        eligible, residual_bytes, block_bytes, None if kv_cache_memory_bytes is None else geometry
    )


def require_few_units(geometry: Geometry) -> None:
    """Refuse more units than a status page has room for.

    Raises
    ------
    DpsConfigError
        One line with the number of units and the remedy.
    """
    if geometry.num_units > MAX_UNITS:
        raise DpsConfigError(
            f"additional_config.dps.unit_bytes gives {geometry.num_units} units of "
            f"{geometry.unit_bytes} bytes: at most {MAX_UNITS}; use larger units"
        )


def require_few_layers(layers: int) -> None:
    """Refuse more layers that return one by one than a status page has room for.

    Raises
    ------
    DpsConfigError
        One line with the number of layers and the remedy.
    """
    if layers > MAX_LAYERS:
        raise DpsConfigError(
            f"additional_config.dps.return_by is 'layer' and the model has {layers} layers: at "
            f"most {MAX_LAYERS} return one by one; use 'all'"
        )


def no_eligible_layer(model: str, formats: Sequence[str]) -> DpsConfigError:
    """The error of a model that cannot be split at all."""
    return DpsConfigError(
        f"model {model!r} has no layer that a nested format fits (additional_config.dps.formats "
        f"is {list(formats)}): serve it without quantization 'dps', or allow more formats"
    )


@dataclass(frozen=True)
class _Layer:
    """A layer of the engine and the checkpoint's matrices stacked in it."""

    name: str
    parts: tuple[Weight, ...]
    elements: int
    """Of one rank."""

    @property
    def residual_bytes(self) -> int:
        return -(-self.elements // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _folder(model: str) -> Path | None:
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if model.startswith((".", "/", "~")) or folder.is_dir():
        raise DpsConfigError(
            f"model_source is {model!r}: there is no config.json in that folder; give a Hugging "
            "Face model folder or id"
        )
    return None


def _served_dtype(model: str, checkpoint: Checkpoint, dtype: str | None) -> torch.dtype:
    """The type vLLM will hold the weights in; the folder must hold 16-bit or float32 ones."""
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.get("quant_method", "unknown")
        raise DpsConfigError(
            f"model {model!r} is quantized already (quantization_config.quant_method is "
            f"{method!r}): give its 16-bit checkpoint, or leave out quantization 'dps'"
        )
    if dtype not in (None, "auto"):
        name = str(dtype).removeprefix("torch.")
        if name not in _SERVED:
            raise DpsConfigError(
                f"dtype is {name!r}: nested formats split 16-bit weights; use 'float16' or "
                "'bfloat16'"
            )
        return _SERVED[name]
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if stored is None and checkpoint.weights:
        stored = _STORED.get(checkpoint.weights[0].dtype)
    return _SERVED.get(str(stored), torch.bfloat16)


def _splittable(checkpoint: Checkpoint, ranks: int, min_split_bytes: int) -> list[_Layer]:
    homes: dict[str, list[Weight]] = {}
    for weight in checkpoint.weights:
        if reason_to_keep(weight.home) is None:
            homes.setdefault(weight.home, []).append(weight)
    layers = []
    for name, parts in homes.items():
        elements = sum(part.elements_per_rank(ranks, checkpoint.kv_heads) for part in parts)
        if 2 * elements >= min_split_bytes:
            layers.append(_Layer(name, tuple(parts), elements))
    return layers


def _refuse_quantized(model: str, checkpoint: Checkpoint) -> None:
    for weight in checkpoint.weights:
        if weight.dtype not in _STORED:
            raise DpsConfigError(
                f"model {model!r} is quantized already ({weight.name} is {weight.dtype}): give "
                "its 16-bit checkpoint, or leave out quantization 'dps'"
            )


def _find_eligible(
    model: str, layers: list[_Layer], dtype: torch.dtype, formats: Sequence[str]
) -> str:
    """Name of the first layer that some format fits; all weights are read only if there is none.

    Layers of a single matrix come first, the smallest first: for them the answer is exact. If no
    matrix of a stacked layer fits a format, the stack does not fit it either.
    """
    for layer in sorted(layers, key=lambda layer: (len(layer.parts), layer.elements)):
        for part in layer.parts:
            nested, _ = choose(part.load(dtype), part.name, formats)
            if nested is not None:
                return layer.name
    raise no_eligible_layer(model, formats)


def _block_tokens(checkpoint: Checkpoint, asked: int | None, kind: DriverKind) -> int:
    if kind == "cuda":
        return asked or CUDA_BLOCK_TOKENS
    if checkpoint.latent_attention:
        return LATENT_BLOCK_TOKENS
    return asked or DEFAULT_BLOCK_TOKENS
