"""What the scheduler tells every rank before a step, in step order.

The scheduler decides, the ranks obey: all ranks of a tensor-parallel group receive the same
``StepCommand`` objects in the same order, so that their memory states never differ.
"""

from dataclasses import dataclass

from dps_ray.modes import Mode


@dataclass(frozen=True, slots=True)
class RestoreTask:
    """Copy residual segment ``segment`` back into physical unit ``unit``.

    ``epoch`` is unique among all restores of an engine and grows: it names this attempt, so that
    the completion of a cancelled one is never mistaken for it.
    """

    unit: int
    segment: int
    epoch: int


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy a live KV block, all layers of it, from block id ``source`` to ``target``.

    Every block table of the rank that names ``source`` names ``target`` from this step on.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Orders of one step, applied in this order before any kernel of the step is launched."""

    mode: Mode
    """Precision of the step's forward pass."""
    full_layers: tuple[int, ...] = ()
    """Layers that run in full precision in a fast step, as their residual is back and verified;
    indices in the order of the residual. Empty in a full step."""
    cancel: tuple[RestoreTask, ...] = ()
    """Restores to abandon: their units are needed for KV blocks now."""
    zero: tuple[int, ...] = ()
    """Units to zero before their first KV write: residual bytes read as floats may be NaN."""
    move: tuple[BlockMove, ...] = ()
    """KV blocks to move out of lent units. What the step itself allocates, it names by new ids."""
    hold: bool = False
    """Open restores stop where they are: a burst has come, and their units are the next to be lent.
    What they have copied stays, and the first command without it lets them go on from there."""
    restore: tuple[RestoreTask, ...] = ()
    """Restores that may start once every earlier step has completed."""
