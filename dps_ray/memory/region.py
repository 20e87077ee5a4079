"""The shared region of one rank: physical units seen by the KV cache and by the weights at once."""

from contextlib import ExitStack, suppress
from typing import Literal, Self

import torch

from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.driver import VirtualRange, VmmDriver, VmmError
from dps_ray.memory.geometry import Geometry

Binding = Literal["fixed", "any"]


class ResidualMismatchError(RuntimeError):
    """Residual bytes in place differ from the backup."""


class SharedRegion:
    """Units mapped twice: for ever behind the KV range, and segment by segment behind the weights.

    Invariant: the residual range is mapped completely, segments and units being one to one. A
    weight that is read while its unit is lent gives wrong bytes, never a fault. The one exception:
    a remap was refused, and so was putting the old mapping back. That segment has no memory behind
    it then; it counts as not restored, nothing here reads it, and the next ``rebind`` mends it.

    Building is transactional: when a driver call fails, everything done so far is undone. From
    then on the region owns the arena and closes it.

    Parameters
    ----------
    driver
        Driver of the rank's memory, the arena's own.
    arena
        Holds all residual bytes of the rank; sealed here.
    geometry
        Plan for exactly ``arena.used_bytes`` of residual.
    binding
        ``fixed``: segment i stays on unit i. ``any``: ``rebind`` moves segments between units.

    Raises
    ------
    VmmError
        When a driver call is refused.
    ValueError
        When geometry and arena do not fit together.
    """

    def __init__(
        self, driver: VmmDriver, arena: ResidualArena, geometry: Geometry, binding: Binding
    ) -> None:
        unit_bytes, num_units = geometry.unit_bytes, geometry.num_units
        if num_units != -(-arena.used_bytes // unit_bytes):
            raise ValueError(
                f"geometry has {num_units} units of {unit_bytes} bytes for a residual of "
                f"{arena.used_bytes} bytes"
            )
        if geometry.residual_span_bytes > arena.capacity_bytes:
            raise ValueError(
                f"{num_units} units of {unit_bytes} bytes exceed the residual address range of "
                f"{arena.capacity_bytes} bytes"
            )
        self.geometry = geometry
        self.binding: Binding = binding
        self.driver = driver
        self._arena = arena
        self._unit_of = list(range(num_units))
        self._segment_of = list(range(num_units))
        self._holes: set[int] = set()
        """Segments with no memory behind them."""
        with ExitStack() as undo:
            kv_range = self._build(undo)
            self.kv_tensor = driver.tensor(
                kv_range.address + geometry.pad_bytes,
                geometry.num_blocks * geometry.block_stride_bytes,
            )
            """All KV blocks, base blocks first, 1-D uint8; base blocks are zero."""
            base_bytes = geometry.base_blocks * geometry.block_stride_bytes
            driver.compute.zero(self.kv_tensor[:base_bytes])
            driver.compute.synchronize()
            arena.seal(unit_bytes)
            self.backup = arena.backup
            self._teardown = undo.pop_all()

    def _build(self, undo: ExitStack) -> VirtualRange:
        driver, geometry = self.driver, self.geometry
        kv_range = driver.reserve(geometry.kv_span_bytes)
        undo.callback(driver.free, kv_range)
        # All memory is taken before any address changes, and unmapped before any is given back.
        base = driver.create(geometry.base_span_bytes)
        undo.callback(driver.release, base)
        self._units = []
        for _ in range(geometry.num_units):
            handle = driver.create(geometry.unit_bytes)
            undo.callback(driver.release, handle)
            self._units.append(handle)
        driver.map(kv_range.address, base)
        undo.callback(driver.unmap, kv_range.address, base.nbytes)
        for index, handle in enumerate(self._units):
            self._map_segment(index, index)
            undo.callback(self._unmap_segment, index)
            if geometry.elastic_blocks:
                address = kv_range.address + base.nbytes + index * geometry.unit_bytes
                driver.map(address, handle)
                undo.callback(driver.unmap, address, handle.nbytes)
        return kv_range

    def unit_kv_view(self, unit: int) -> torch.Tensor:
        """The unit's bytes as KV blocks, 1-D uint8 ``[unit_bytes]``.

        Raises
        ------
        ValueError
            When there is no such unit, or the region does not lend.
        """
        if not self.geometry.elastic_blocks:
            raise ValueError(f"unit {unit} has no KV blocks: the region was built without lending")
        self._check_index("unit", unit)
        geometry = self.geometry
        start = geometry.base_blocks * geometry.block_stride_bytes + unit * geometry.unit_bytes
        return self.kv_tensor[start : start + geometry.unit_bytes]

    def block_view(self, block: int) -> torch.Tensor:
        """Bytes of one KV block over all layers, 1-D uint8 ``[block_stride_bytes]``."""
        if not 0 <= block < self.geometry.num_blocks:
            raise ValueError(f"block {block} is not in 0..{self.geometry.num_blocks - 1}")
        stride = self.geometry.block_stride_bytes
        return self.kv_tensor[block * stride : (block + 1) * stride]

    def segment_view(self, segment: int) -> torch.Tensor:
        """The segment's residual bytes in place, 1-D uint8; the last segment may be shorter."""
        self._check_index("segment", segment)
        nbytes = self.backup.segment(segment).numel()
        return self.driver.tensor(self._segment_address(segment), nbytes)

    def segment_of(self, unit: int) -> int:
        """The segment mapped onto a unit, whether or not its bytes are in place."""
        return self._segment_of[unit]

    def unit_of(self, segment: int) -> int:
        """The unit behind a segment, whether or not its bytes are in place."""
        return self._unit_of[segment]

    def maps(self, segment: int, unit: int) -> bool:
        """Whether ``segment`` leads to ``unit`` now."""
        return self._unit_of[segment] == unit and segment not in self._holes

    def rebind(self, segment: int, unit: int) -> None:
        """Put ``segment`` onto ``unit``; the segment that was there takes its place in exchange.

        Under ``fixed`` nothing moves. Under ``any`` neither segment may hold bytes in place, and
        nothing in flight may read them: true of a free unit in fast mode.

        Raises
        ------
        ValueError
            Under ``fixed``, when the segment belongs elsewhere.
        VmmError
            When a driver call is refused; segments and units are as before, but for a hole (see
            the class) when that is refused too.
        """
        self._check_index("segment", segment)
        self._check_index("unit", unit)
        previous_unit = self._unit_of[segment]
        if self.maps(segment, unit):
            return
        if self.binding == "fixed":
            raise ValueError(
                f"segment {segment} belongs to unit {previous_unit}, not {unit}: binding is fixed"
            )
        moves = {segment: unit, self._segment_of[unit]: previous_unit}
        try:
            for index in moves:
                self._unmap_segment(index)
            for index, target in moves.items():
                self._map_segment(index, target)
        except VmmError:
            for index in moves:
                # What cannot be put back stays a hole: the refusal itself is what is reported.
                with suppress(VmmError):
                    self._unmap_segment(index)
                    self._map_segment(index, self._unit_of[index])
            raise
        for index, target in moves.items():
            self._unit_of[index] = target
            self._segment_of[target] = index

    def upload_all(self) -> None:
        """Copy the whole backup into place, at start-up or while no unit is lent.

        Raises
        ------
        ResidualMismatchError
            When the bytes in place differ from the backup afterwards.
        """
        transfer = self.driver.transfer
        for segment in range(self.geometry.num_units):
            transfer.copy(self.segment_view(segment), self.backup.segment(segment))
        transfer.synchronize()
        self.verify_all()

    def verify(self, segment: int, checksum: int | None = None) -> bool:
        """Whether the segment's bytes in place match the backup's checksum.

        ``checksum`` is theirs, where it was taken as they arrived; else they are read now.
        """
        if segment in self._holes:
            return False
        if checksum is None:
            checksum = self.driver.transfer.checksum(self.segment_view(segment))
        return checksum == self.backup.checksum(segment)

    def verify_all(self) -> None:
        """Check every segment; meaningful only while no unit is lent.

        Raises
        ------
        ResidualMismatchError
            Naming the segments that differ.
        """
        wrong = [index for index in range(self.geometry.num_units) if not self.verify(index)]
        if wrong:
            raise ResidualMismatchError(
                f"residual segments {wrong} of {self.geometry.num_units} differ from the backup"
            )

    def close(self) -> None:
        """Give all memory back; no view may be used any more. Idempotent."""
        with ExitStack() as teardown:
            teardown.callback(self._arena.close)
            teardown.push(self._teardown.pop_all())
            teardown.callback(self.driver.transfer.synchronize)
            teardown.callback(self.driver.compute.synchronize)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _map_segment(self, segment: int, unit: int) -> None:
        self.driver.map(self._segment_address(segment), self._units[unit])
        self._holes.discard(segment)

    def _unmap_segment(self, segment: int) -> None:
        if segment not in self._holes:
            self.driver.unmap(self._segment_address(segment), self.geometry.unit_bytes)
            self._holes.add(segment)

    def _segment_address(self, segment: int) -> int:
        return self._arena.address + segment * self.geometry.unit_bytes

    def _check_index(self, what: str, index: int) -> None:
        if not 0 <= index < self.geometry.num_units:
            raise ValueError(f"{what} {index} is not in 0..{self.geometry.num_units - 1}")
