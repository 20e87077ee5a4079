"""Which replica has lately seen which prompt prefix: one router's guess at the prefix caches."""

from collections import OrderedDict
from collections.abc import Mapping

CHUNK_CHARS = 256
MAX_CHUNKS = 64
CAPACITY = 65536


def prefix_hashes(prompt: str) -> tuple[int, ...]:
    """Hashes of the prompt's leading whole chunks, each over everything up to its end.

    They hold within one process only. A prompt shorter than one chunk has none: so short a
    prefix is not worth a detour.
    """
    hashes: list[int] = []
    last = 0
    for start in range(
        0, min(len(prompt) - CHUNK_CHARS, CHUNK_CHARS * (MAX_CHUNKS - 1)) + 1, CHUNK_CHARS
    ):
        last = hash((last, prompt[start : start + CHUNK_CHARS]))
        hashes.append(last)
    return tuple(hashes)


class PrefixIndex:
    """Chunks by the replicas they were sent to; the least recently used chunks are dropped.

    Parameters
    ----------
    capacity
        Most chunks remembered.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._replica: OrderedDict[int, str] = OrderedDict()

    def note(self, prefix: tuple[int, ...], replica_id: str) -> None:
        """The replica has got a prompt with this prefix."""
        for chunk in prefix:
            self._replica[chunk] = replica_id
            self._replica.move_to_end(chunk)
        while len(self._replica) > self._capacity:
            self._replica.popitem(last=False)

    def matches(self, prefix: tuple[int, ...]) -> Mapping[str, float]:
        """Share of the prefix that each replica has got, up to the first chunk it has not.

        A chunk is credited to the replica that got it last, and so are the chunks before it: a
        replica cannot have seen the later part of a prefix without the earlier one.
        """
        shares: dict[str, float] = {}
        for number, chunk in enumerate(prefix, start=1):
            replica_id = self._replica.get(chunk)
            if replica_id is None:
                break
            shares[replica_id] = number / len(prefix)
        return shares
