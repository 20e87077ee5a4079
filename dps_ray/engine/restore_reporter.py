"""What a rank writes down when a restore of its has ended, for the scheduler and for the log."""

import logging

from dps_ray.engine.rank_section import RankSection
from dps_ray.memory.restore_result import RestoreResult

logger = logging.getLogger("vllm.dps")


class RestoreReporter:
    """Turns outcomes of restores into cells of the status page, and a fault into one line of log.

    Parameters
    ----------
    rank
        Number of the rank, for the log.
    section
        Its part of the status page.
    """

    def __init__(self, rank: int, section: RankSection) -> None:
        self._rank = rank
        self._section = section
        self._failing: set[int] = set()
        """Segments whose latest restore failed."""

    def __call__(self, result: RestoreResult) -> None:
        """Write one outcome down. From the restore thread."""
        section, segment = self._section, result.task.segment
        if result.ok:
            section["restored_bytes"] += result.nbytes
            section["restore_busy_s"] += result.seconds
            section["restore_bytes_per_s"] = result.nbytes / max(result.seconds, 1e-9)
            section["resumed_bytes"] += result.resumed_bytes
            if self._failing and not self._failing - {segment}:
                logger.info("dps rank %d: restores succeed again", self._rank)
            self._failing.discard(segment)
        else:
            section["restores_failed"] += 1
            # Retries and further segments say nothing new: one line for each time it breaks.
            if not self._failing:
                logger.error("dps rank %d: %s", self._rank, result.error)
            self._failing.add(segment)
            section.error = result.error or ""
        # Last: the scheduler acts on this cell.
        section.outcomes[result.task.unit] = result.task.epoch if result.ok else -result.task.epoch
