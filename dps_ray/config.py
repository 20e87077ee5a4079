"""Options of one elastic engine: ``additional_config: {"dps": {...}}`` in vLLM's configuration."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dps_ray.choices import nearest
from dps_ray.faults import faults_of
from dps_ray.modes import Pin

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class DpsConfigError(ValueError):
    """A configuration that cannot work.

    Parameters
    ----------
    *faults
        One sentence each that begins with the field's dotted path and names value and remedy.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class DpsOptions(BaseModel):
    """Every knob of one replica's elastic memory, with units in the names.

    The defaults serve a replica without tuning; ``dps_ray/scheduling/README.md`` gives the reason
    for each threshold.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pin: Pin = Pin.AUTO
    """Start-up mode pin: ``auto`` lets the policy switch, ``full`` never lends, ``fast`` never
    restores."""

    lend: bool = True
    """Lend residual memory to the KV cache. ``false`` gives a static engine in the pinned mode."""

    driver: Literal["auto", "host", "cuda"] = "auto"
    """Memory driver: ``auto`` picks ``cuda`` on CUDA devices and ``host`` (memfd) elsewhere."""

    binding: Literal["fixed", "any"] = "fixed"
    """``fixed``: a residual segment always returns to its own unit, no remapping at run time.
    ``any``: it returns to whichever unit is free first (the paper's), at one remap a restore."""

    unit_bytes: Annotated[int, Field(gt=0)] | None = None
    """Smallest size of a physical unit, bytes. Rounded up to whole KV blocks and whole mapping
    granules. Default: a 64th of the residual, at most 8 MiB, at least a 1,000th of it."""

    formats: tuple[Literal["e4m3", "e5m2", "e4m3_row"], ...] = ("e4m3", "e4m3_row", "e5m2")
    """Nested formats a layer may use, in order of preference."""

    min_split_bytes: Annotated[int, Field(ge=0)] = 0
    """Layers whose 16-bit weight is smaller than this stay whole, bytes. 0: split every layer."""

    kernel: Literal["auto", "exact", "fused"] = "auto"
    """``exact`` rebuilds 16-bit weights and calls the stock GEMM: bit-identical to vLLM on the
    16-bit model. ``fused`` decodes inside the GEMM: faster, same error against float32.
    ``auto`` is ``fused`` where the compiled kernels are installed, else ``exact``."""

    graphs: Literal["eager", "lazy"] = "eager"
    """CUDA graphs, one set a mode: ``eager`` captures both sets at start. ``lazy`` captures the set
    of the start-up mode, and a graph of the other mode after the first step that missed it and ran
    without: a shorter start for slower first steps of a burst. Memory is kept for both either
    way."""

    high_watermark: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Demand, as a share of base KV blocks, at which the replica goes fast. 1.0: only when a
    request would not fit otherwise (Algorithm 1). Above 1 requests would wait for memory that
    could be lent."""

    low_watermark: Fraction = 0.6
    """Demand, as a share of base KV blocks, at or below which restoring may start."""

    min_fast_dwell_s: Annotated[float, Field(ge=0.0)] = 0.5
    """Shortest stay in fast mode before restoring may start, seconds."""

    min_full_dwell_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Shortest stay in full mode before memory may be lent again, seconds. Above 0 it can cost
    preemptions."""

    trend_horizon_s: Annotated[float, Field(ge=0.0)] = 0.5
    """How far ahead growing demand is projected before it is held against the watermarks, seconds.
    0: only the demand of the moment counts."""

    reuse_fast_prefixes: Literal["allow", "recompute"] = "allow"
    """Whether full mode reuses cached prefixes that fast mode wrote, or that follow such ones.
    ``allow``: yes. Recomputing them would load the replica just when a burst has passed, and a
    request that runs through a switch mixes both anyway. ``recompute``: no. A request with the
    precision floor ``full`` never reuses them, whatever is chosen here."""

    compaction_blocks_per_step: Annotated[int, Field(ge=0)] = 16
    """KV blocks that one step may move from lent units to base memory, so that a long request
    cannot hold the replica in fast mode. 0: never move blocks."""

    save_prefixes: bool = True
    """Whether cached prefixes that stand in a unit move to base memory, in place of ones used less
    recently, before the unit goes back to the weights. They share the step's budget above with
    live blocks, which come first."""

    restore_chunk_bytes: Annotated[int, Field(ge=4096)] = 4 << 20
    """Bytes copied between two looks at cancellation and pacing (the paper's 4 MiB)."""

    restore_max_inflation: Fraction = 0.05
    """Step-time inflation the restore may cause under load, a share; pacing backs off above it."""

    restore_floor_bytes_per_s: Annotated[float, Field(gt=0.0)] = 64e6
    """Pacing never falls below this rate, bytes per second, so that a restore always ends."""

    restore_cap_bytes_per_s: Annotated[float, Field(gt=0.0)] | None = None
    """A restore never runs faster than this, bytes per second a rank, idle or not: leaves a link
    or memory that others use to them. Default: no cap."""

    backup_budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Host memory that the residual's backup may take, bytes a rank; it is pinned for a CUDA
    device. Default: whatever the host has."""

    return_by: Literal["all", "layer"] = "all"
    """How full precision returns. ``all``: at once, when every residual byte is back. ``layer``: a
    layer runs in full precision as soon as its own bytes are back, while the others are restored.
    Such steps count as fast in every respect. Not with CUDA graphs."""

    verify_restore: bool = True
    """Compare every restored segment with the backup's checksum before full mode returns."""

    key: str | None = None
    """Name of the engine's status page. Set by the engine; leave it out."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"low_watermark ({self.low_watermark}) must be below high_watermark "
                f"({self.high_watermark}), or the replica would flap between modes"
            )
        if self.pin is Pin.FULL and self.lend:
            raise ValueError(
                "pin 'full' never lends memory: set lend to false with it, or pin 'auto'"
            )
        cap = self.restore_cap_bytes_per_s
        if cap is not None and cap < self.restore_floor_bytes_per_s:
            raise ValueError(
                f"restore_cap_bytes_per_s ({cap:g}) must not be below restore_floor_bytes_per_s "
                f"({self.restore_floor_bytes_per_s:g}): lower that too"
            )
        if self.return_by == "layer" and not self.verify_restore:
            raise ValueError(
                "return_by 'layer' reads layers in the midst of a restore: set verify_restore to "
                "true with it, or return_by to 'all'"
            )
        return self


def parse_options(additional_config: Any) -> DpsOptions:
    """Read and check ``additional_config["dps"]``.

    Raises
    ------
    DpsConfigError
        One line that names each wrong field, its value and what is allowed.
    """
    if additional_config and not isinstance(additional_config, Mapping):
        raise DpsConfigError(
            f"additional_config is {additional_config!r}: give a mapping, such as {{'dps': {{}}}}"
        )
    raw = additional_config.get("dps", {}) if additional_config else {}
    if isinstance(raw, DpsOptions):
        return raw
    if not isinstance(raw, dict):
        raise DpsConfigError(
            f"additional_config.dps is {raw!r}: give a mapping, such as {{'pin': 'auto'}}"
        )
    try:
        return DpsOptions.model_validate(raw)
    except ValidationError as error:
        raise DpsConfigError(*faults_of(error, "additional_config.dps")) from None


def refuse_stray_keys(additional_config: Any) -> None:
    """Refuse keys beside ``dps`` that are likely to be meant for it; other plugins have theirs.

    Raises
    ------
    DpsConfigError
        One line for each key. Only of an engine with quantization ``dps`` can it be known.
    """
    faults = []
    for key in additional_config if isinstance(additional_config, Mapping) else ():
        if str(key) in DpsOptions.model_fields:
            faults.append(f"additional_config.{key} is not read: move it to additional_config.dps")
        elif key != "dps" and (meant := nearest(str(key).lower(), ["dps"])):
            faults.append(
                f"additional_config.{key} is not an option: {meant}remove it or correct its "
                "spelling"
            )
    if faults:
        raise DpsConfigError(*faults)
