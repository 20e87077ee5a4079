"""Tells vLLM's model runners that KV blocks have new ids.

A runner keeps the block ids of its requests between steps and is only ever sent additions. A block
that moved is named anew wherever it stands, before the runner reads the step's own additions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dps_ray.commands import BlockMove


def redirect(runner: Any, moves: Sequence[BlockMove]) -> None:
    """Rename moved blocks in every table of a V1 or V2 model runner.

    Parameters
    ----------
    runner
        vLLM's model runner, V1 (``input_batch``) or V2 (``block_tables``). The layout is
        block-outermost, so kernel blocks are not split and table entries are block ids.
    """
    if not moves:
        return
    if hasattr(runner, "input_batch"):
        _redirect_v1(runner, {move.source: move.target for move in moves})
    else:
        _redirect_v2(runner, moves)


def _redirect_v1(runner: Any, new_id: dict[int, int]) -> None:
    """Requests outside the persistent batch keep their ids too, and rejoin it with them."""
    if runner.prepare_inputs_event is not None:
        # The device may not have read the host's tables for the step before yet.
        runner.prepare_inputs_event.synchronize()
    for state in runner.requests.values():
        for ids in state.block_ids:
            ids[:] = [new_id.get(block, block) for block in ids]
    sources = np.fromiter(new_id, dtype=np.int32)
    for table in runner.input_batch.block_table.block_tables:
        entries = table.block_table.np
        for row in np.flatnonzero(table.num_blocks_per_row):
            used = entries[row, : table.num_blocks_per_row[row]]
            for index in np.flatnonzero(np.isin(used, sources)):
                used[index] = new_id[int(used[index])]


def _redirect_v2(runner: Any, moves: Sequence[BlockMove]) -> None:
    """One gather over each device table; entries past a row's end are read by nobody."""
    renamed = np.arange(runner.kv_cache_config.num_blocks, dtype=np.int32)
    renamed[[move.source for move in moves]] = [move.target for move in moves]
    for table in runner.block_tables.block_tables:
        lookup = torch.from_numpy(renamed).to(table.gpu.device, non_blocking=True)
        table.gpu.copy_(lookup[table.gpu.long()])
