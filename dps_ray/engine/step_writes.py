"""What a scheduled step writes to KV blocks, as ``BlockPrecision`` has to hear of it."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from dps_ray.modes import Mode
from dps_ray.scheduling.block_precision import Written, worth_noting


class StepWrites:
    """Reads it off vLLM's block tables.

    Parameters
    ----------
    managers
        vLLM's ``SingleTypeKVCacheManager`` of each group of layers.
    """

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._window_tokens = math.gcd(*(manager.block_size for manager in managers))

    def of(self, output: Any, mode: Mode) -> Iterator[Written]:
        """What a step computes, by request, where that can change what stands behind a block; the
        null block holds nothing."""
        cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
        starts = chain(
            zip(cached.req_ids, cached.num_computed_tokens, strict=True),
            ((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs),
        )
        for name, start in worth_noting(mode, starts, tokens, self._window_tokens):
            end = start + tokens[name]
            blocks: list[int] = []
            previous: list[int] = []
            for manager in self._managers:
                size, table = manager.block_size, manager.req_to_blocks[name]
                written = table[start // size : -(-end // size)]
                blocks += (block.block_id for block in written if not block.is_null)
                if start and not (last := table[(start - 1) // size]).is_null:
                    previous.append(last.block_id)
            yield Written(blocks, previous if start else None)
