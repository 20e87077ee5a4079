"""One weight of a layer, split at load: upper bytes stay, lower bytes go to the shared region."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import dps_kernels
import torch
from dps_kernels import ROW_MAJOR, Layout, Planes, check_planes, preferred_layout, to_layout
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from dps_ray.config import DpsConfigError
from dps_ray.engine import rank as ranks
from dps_ray.engine.ops import planes_now
from dps_ray.precision.encode import choose
from dps_ray.precision.misfits import Misfits, apply_misfits, misfits_of
from dps_ray.precision.nested import NestedTensor
from dps_ray.precision.report import LayerReport

Permutation = Callable[[torch.Tensor], torch.Tensor]
"""Reorders 16-bit elements the way a kernel reads them; an element's bytes stay together."""


@dataclass(frozen=True)
class SplitWeight:
    """Both bytes of a weight ``[..., N, K]``, in the element order its kernel reads.

    ``lower`` is a view into the rank's residual address range: it must not be read in fast mode.
    """

    upper: torch.Tensor
    lower: torch.Tensor
    fmt: str
    row_shift: torch.Tensor | None
    misfits: Misfits | None
    dtype: torch.dtype
    layout: Layout

    def planes(self) -> Planes:
        """The bytes the running step may read."""
        return planes_now(self.upper, self.lower, self.fmt, self.row_shift, self.layout)

    def planes_full(self) -> Planes:
        """Both bytes, readable in full mode only."""
        return Planes(self.upper, self.lower, self.fmt, self.row_shift, self.layout)

    def rebuild_experts(self, experts: torch.Tensor | None, slot: str) -> torch.Tensor:
        """16-bit weights ``[E, N, K]``, of all experts or of the named ones alone."""
        planes = self.planes()
        buffer = ranks.current().scratch(self.upper.shape, self.dtype, slot)
        dps_kernels.reconstruct(buffer, planes, experts)
        if self.misfits is not None and planes.lower is not None:
            apply_misfits(buffer, self.misfits)
        return buffer


@dataclass(frozen=True)
class EncodedWeight:
    """A weight whose format is chosen but whose bytes have no home yet."""

    name: str
    original: torch.Tensor
    nested: NestedTensor
    misfits: Misfits | None


def encode_weight(
    name: str, weight: torch.Tensor, allowed: tuple[str, ...] | None = None
) -> EncodedWeight | None:
    """Choose a format for a 16-bit weight and report the choice; ``None``: the layer stays whole.

    Parameters
    ----------
    weight
        ``[N, K]`` or ``[E, N, K]``, float16 or bfloat16.
    allowed
        Formats this layer may use; default: those of the options.
    """
    rank = ranks.current()
    if weight.numel() * weight.element_size() < rank.options.min_split_bytes:
        report_whole(name, weight, "smaller than min_split_bytes")
        return None
    nested, report = choose(weight, name, allowed or rank.options.formats)
    rank.report.add(report)
    if nested is None:
        return None
    misfits = misfits_of(weight, nested) if report.misfits else None
    return EncodedWeight(name, weight, nested, misfits)


def can_fuse_experts(
    activation: MoEActivation, moe: FusedMoEConfig, encoded: Iterable[EncodedWeight | None]
) -> bool:
    """Whether the kernels compute these experts: gated by SiLU, without bias, all split."""
    gated = activation is MoEActivation.SILU and not moe.has_bias
    return ranks.current().fused and gated and all(encoded)


def refuse_capture(name: str, why: str) -> None:
    """Refuse, where CUDA graphs are to be captured, a layer that does not run in the kernels.

    Raises
    ------
    DpsConfigError
        One line with the layer, the reason and the remedy.
    """
    if ranks.current().captures_graphs:
        raise DpsConfigError(
            f"layer {name} does not run in the fused kernels ({why}), and what replaces them "
            "cannot be captured in a CUDA graph: set enforce_eager"
        )


def report_whole(name: str, weight: torch.Tensor, reason: str) -> None:
    """Report a layer that keeps its 16-bit weight, and why."""
    ranks.current().report.add(
        LayerReport(
            name=name,
            fmt=None,
            reason=reason,
            shape=tuple(weight.shape),
            dtype=str(weight.dtype).removeprefix("torch."),
            max_abs=float(weight.abs().max()),
        )
    )


def place_fused(encoded: EncodedWeight) -> SplitWeight:
    """Give both bytes their homes in the order the fused kernels like best.

    Misfits are dropped: the fused kernels multiply by the values the format holds.
    """
    nested = encoded.nested
    rows, columns = nested.upper.shape[-2:]
    layout = preferred_layout(nested.upper.device.type, rows, columns, nested.dtype)
    if layout == ROW_MAJOR:
        refuse_capture(encoded.name, f"{columns} columns are no multiple of 16")
    ordered = replace(
        nested, upper=to_layout(nested.upper, layout), lower=to_layout(nested.lower, layout)
    )
    return place(replace(encoded, nested=ordered, misfits=None), layout=layout)


def place(
    encoded: EncodedWeight, permute: Permutation | None = None, layout: Layout = ROW_MAJOR
) -> SplitWeight:
    """Give both bytes their homes, in the order ``permute`` makes (``layout`` describes it)."""
    nested, misfits = encoded.nested, encoded.misfits
    upper, lower = nested.upper, nested.lower
    if permute is not None:
        upper, lower = _permute_bytes(nested, permute)
        if misfits is not None:
            misfits = _permute_misfits(misfits, encoded.original, permute)
    home = ranks.current().arena.add(encoded.name, lower)
    check_planes(Planes(upper, home, str(nested.fmt), nested.row_shift, layout), (2, 3))
    return SplitWeight(
        upper=upper,
        lower=home,
        fmt=str(nested.fmt),
        row_shift=nested.row_shift,
        misfits=misfits,
        dtype=nested.dtype,
        layout=layout,
    )


def _permute_bytes(nested: NestedTensor, permute: Permutation) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.stack((nested.lower, nested.upper), dim=-1)
    words = permute(pairs.view(nested.dtype).squeeze(-1))
    both = words.contiguous().view(torch.uint8).view(*words.shape, 2)
    return both[..., 1].contiguous(), both[..., 0].contiguous()


def _permute_misfits(misfits: Misfits, original: torch.Tensor, permute: Permutation) -> Misfits:
    marks = torch.zeros(original.numel(), dtype=torch.int16)
    marks[misfits.index] = 1
    marks = marks.view(original.shape).view(original.dtype)
    index = permute(marks).view(torch.int16).reshape(-1).nonzero().reshape(-1)
    return replace(misfits, index=index, value=permute(original).reshape(-1)[index])
