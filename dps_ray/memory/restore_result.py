"""What restores leave behind: an outcome each, and totals."""

from dataclasses import dataclass

from dps_ray.commands import RestoreTask


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Outcome of a restore that was not cancelled."""

    task: RestoreTask
    ok: bool
    """The segment is in place; verified, unless verification is off."""
    nbytes: int
    seconds: float
    """Time spent copying and verifying, without fences, pacing and holds."""
    resumed_bytes: int = 0
    """Of the bytes, those in place when it last went on after a hold: not copied again."""
    error: str | None = None


def mismatch(task: RestoreTask) -> str:
    """Why a restore failed that put other bytes in place than the backup has."""
    return (
        f"segment {task.segment} differs from the backup after its restore into unit "
        f"{task.unit}: it stays lent"
    )


@dataclass(slots=True)
class RestoreCounters:
    """Totals since the start."""

    bytes: int = 0
    """Residual bytes copied, those of cancelled restores included."""
    busy_seconds: float = 0.0
    """Time spent copying and verifying, without fences, pacing and holds."""
    completed: int = 0
    cancelled: int = 0
    failed: int = 0

    def add(self, **amounts: float) -> None:
        """Add to the named totals."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)
