"""A 16-bit checkpoint some of whose layers hold the values that fast mode multiplies by."""

import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dps_ray.engine.checkpoint import Checkpoint, Weight
from dps_ray.engine.kept_whole import reason_to_keep
from dps_ray.precision.encode import choose
from dps_ray.precision.nested import decode_fast

FILE = "model.safetensors"


def round_layers(folder: Path, target: Path, full_layers: Collection[int]) -> Path:
    """Copy a tiny model to ``target`` with every layer rounded but ``full_layers``."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / FILE)
    stacks: dict[str, list[Weight]] = {}
    for weight in Checkpoint.open(folder).weights:
        if weight.layer not in full_layers and reason_to_keep(weight.home) is None:
            stacks.setdefault(weight.home, []).append(weight)
    for home, parts in stacks.items():
        # A format is chosen for all that vLLM stacks into one layer.
        rows = [tensors[part.name].reshape(-1, part.shape[-1]) for part in parts]
        nested, _ = choose(torch.cat(rows), home)
        if nested is None:
            continue
        rounded = decode_fast(nested).split([len(part) for part in rows])
        for part, values in zip(parts, rounded, strict=True):
            tensors[part.name] = values.reshape(part.shape).contiguous()
    save_file(tensors, target / FILE, metadata={"format": "pt"})
    return target
