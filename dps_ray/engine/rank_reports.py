"""What the ranks have reported, folded over the tensor-parallel group.

A restore counts only when every rank has finished it: the mode flips for all ranks or for none.
"""

from dataclasses import dataclass

from dps_ray.config import DpsConfigError
from dps_ray.engine.status_page import StatusPage
from dps_ray.scheduling.layers import LayerSegments
from dps_ray.scheduling.sum_manager import SumManager


@dataclass(frozen=True)
class RankGeometry:
    """The part of a rank's memory geometry that the scheduler must know."""

    base_blocks: int
    elastic_blocks: int
    blocks_per_unit: int
    units: int


class RankReports:
    """Reads the rank sections of a status page."""

    def __init__(self, page: StatusPage, world_size: int) -> None:
        self._sections = [page.rank(rank) for rank in range(world_size)]

    def geometry(self) -> RankGeometry:
        """The geometry all ranks share.

        Raises
        ------
        DpsConfigError
            When ranks differ: their blocks would not name the same memory.
        """
        shapes = {
            RankGeometry(
                base_blocks=int(section["base_blocks"]),
                elastic_blocks=int(section["elastic_blocks"]),
                blocks_per_unit=int(section["blocks_per_unit"]),
                units=int(section["units"]),
            )
            for section in self._sections
        }
        if len(shapes) != 1:
            raise DpsConfigError(
                f"tensor-parallel ranks differ in memory geometry ({shapes}): the model must "
                "shard evenly; choose a tensor_parallel_size that divides heads and experts"
            )
        return shapes.pop()

    def layers(self) -> LayerSegments | None:
        """Where each layer's residual lies; ``None`` where all layers return at once.

        Raises
        ------
        DpsConfigError
            When ranks differ: a layer would be full on one and fast on another.
        """
        places = {
            (tuple(section.layer_bounds), int(section["unit_bytes"])) for section in self._sections
        }
        if len(places) != 1:
            raise DpsConfigError(
                "additional_config.dps.return_by: tensor-parallel ranks differ in "
                "where their layers' residual lies: a layer could be split on some of them only; "
                "use 'all'"
            )
        bounds, unit_bytes = places.pop()
        return LayerSegments.cut(bounds, unit_bytes) if bounds else None

    def deliver(self, manager: SumManager) -> None:
        """Tell the manager of every open restore that has ended on all ranks, or failed on one."""
        for task in manager.ledger.open_restores:
            outcomes = [section.outcomes[task.unit] for section in self._sections]
            if any(outcome == -task.epoch for outcome in outcomes):
                rank = outcomes.index(-task.epoch)
                # A rank has room for one text: of two units that failed between two steps, the
                # later one's.
                cause = f"rank {rank}, latest failure: {self._sections[rank].error}"
                manager.on_restore_failed(task.unit, task.epoch, cause)
            elif all(outcome == task.epoch for outcome in outcomes):
                manager.on_restored(task.unit, task.epoch)

    def total(self, field: str) -> float:
        """Sum of a counter over all ranks."""
        return sum(section[field] for section in self._sections)

    def slowest(self, field: str) -> float:
        """Largest value of a counter over all ranks."""
        return max(section[field] for section in self._sections)
