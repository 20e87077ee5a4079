"""What a driver has reserved, created and mapped, and which calls that allows."""

import bisect
from collections import Counter

from dps_ray.memory.driver import PhysicalHandle, VirtualRange, VmmError


class Mappings:
    """Refuses misuse before it reaches the system, the same way on every driver.

    The ``check_*`` methods raise and change nothing; the driver acts, then tells what it has done.
    So a call that the system refuses leaves the book as it was.
    """

    def __init__(self, granularity_bytes: int) -> None:
        self._granularity_bytes = granularity_bytes
        self._reserved: dict[int, VirtualRange] = {}
        self._handles: dict[PhysicalHandle, None] = {}
        self._uses = Counter[PhysicalHandle]()
        self._mapped: dict[int, PhysicalHandle] = {}
        self._addresses: list[int] = []
        """Keys of ``_mapped``, sorted: neighbours are found without a scan."""

    @property
    def created_bytes(self) -> int:
        """Physical memory of all handles, bytes."""
        return sum(handle.nbytes for handle in self._handles)

    @property
    def empty(self) -> bool:
        """Nothing is reserved, created or mapped."""
        return not (self._reserved or self._handles)

    def check_size(self, call: str, nbytes: int) -> None:
        """Refuse what is no positive multiple of the granularity."""
        if nbytes <= 0 or nbytes % self._granularity_bytes:
            reason = f"not a positive multiple of {self._granularity_bytes}"
            raise VmmError(call, f"{nbytes} bytes", reason)

    def check_map(self, address: int, handle: PhysicalHandle) -> None:
        """Refuse an unknown handle, and addresses not reserved, not aligned or in use."""
        sizes = f"{handle.nbytes} bytes at {address:#x}"
        if handle not in self._handles:
            raise VmmError("map", sizes, "unknown handle")
        if self.range_of(address, handle.nbytes) is None:
            raise VmmError("map", sizes, "address range is not reserved")
        if address % self._granularity_bytes:
            raise VmmError("map", sizes, f"not a multiple of {self._granularity_bytes}")
        if self._overlaps(address, handle.nbytes):
            raise VmmError("map", sizes, "address range is already mapped")

    def check_unmap(self, address: int, nbytes: int) -> None:
        """Refuse anything but exactly what one ``map`` has put there."""
        handle = self._mapped.get(address)
        if handle is None or handle.nbytes != nbytes:
            raise VmmError("unmap", f"{nbytes} bytes at {address:#x}", "no such mapping")

    def check_release(self, handle: PhysicalHandle) -> None:
        """Refuse an unknown handle and one that is still mapped."""
        sizes = f"{handle.nbytes} bytes"
        if handle not in self._handles:
            raise VmmError("release", sizes, "unknown handle")
        if self._uses[handle]:
            raise VmmError("release", sizes, "still mapped: unmap it first")

    def check_free(self, reserved: VirtualRange) -> None:
        """Refuse an unknown range and one that something is still mapped in."""
        sizes = f"{reserved.nbytes} bytes at {reserved.address:#x}"
        if self._reserved.get(reserved.address) != reserved:
            raise VmmError("free", sizes, "not reserved")
        if self._overlaps(reserved.address, reserved.nbytes):
            raise VmmError("free", sizes, "still mapped: unmap it first")

    def range_of(self, address: int, nbytes: int) -> VirtualRange | None:
        """The reserved range that holds these addresses."""
        for reserved in self._reserved.values():
            offset = address - reserved.address
            if 0 <= offset <= reserved.nbytes - nbytes:
                return reserved
        return None

    def reserved(self, reserved: VirtualRange) -> None:
        """Note a new range."""
        self._reserved[reserved.address] = reserved

    def created(self, handle: PhysicalHandle) -> None:
        """Note a new handle."""
        self._handles[handle] = None

    def mapped(self, address: int, handle: PhysicalHandle) -> None:
        """Note a mapping."""
        self._mapped[address] = handle
        bisect.insort(self._addresses, address)
        self._uses[handle] += 1

    def unmapped(self, address: int) -> None:
        """Forget a mapping."""
        self._uses[self._mapped.pop(address)] -= 1
        del self._addresses[bisect.bisect_left(self._addresses, address)]

    def released(self, handle: PhysicalHandle) -> None:
        """Forget a handle."""
        del self._handles[handle]
        del self._uses[handle]

    def freed(self, reserved: VirtualRange) -> None:
        """Forget a range."""
        del self._reserved[reserved.address]

    def _overlaps(self, address: int, nbytes: int) -> bool:
        following = bisect.bisect_left(self._addresses, address + nbytes)
        if following == 0:
            return False
        start = self._addresses[following - 1]
        return address < start + self._mapped[start].nbytes
