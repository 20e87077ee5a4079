"""Moved blocks under their new ids in the model runners' tables.

The V1 runner is proved by real engines (``check engine``); here are the cases those may not meet.
"""

from types import SimpleNamespace

import numpy as np
import torch

from dps_ray.commands import BlockMove
from dps_ray.engine.block_tables import redirect


def v1_runner(prepare_inputs_event: object = None) -> SimpleNamespace:
    entries = np.array([[7, 3, 9, 7], [3, 0, 0, 0], [9, 9, 0, 0]], dtype=np.int32)
    table = SimpleNamespace(
        block_table=SimpleNamespace(np=entries), num_blocks_per_row=np.array([3, 1, 0])
    )
    return SimpleNamespace(
        prepare_inputs_event=prepare_inputs_event,
        input_batch=SimpleNamespace(block_table=SimpleNamespace(block_tables=[table])),
        requests={
            "in the batch": SimpleNamespace(block_ids=([7, 3, 9],)),
            "not scheduled": SimpleNamespace(block_ids=([3, 8],)),
        },
    )


def test_v1_renames_in_every_row_and_in_requests_outside_the_batch() -> None:
    runner = v1_runner()
    kept = runner.requests["not scheduled"].block_ids[0]
    redirect(runner, [BlockMove(7, 1), BlockMove(3, 2)])
    (table,) = runner.input_batch.block_table.block_tables
    assert table.block_table.np[0].tolist() == [1, 2, 9, 7], "an entry past the end is not a block"
    assert table.block_table.np[1, 0] == 2
    assert runner.requests["in the batch"].block_ids == ([1, 2, 9],)
    assert runner.requests["not scheduled"].block_ids == ([2, 8],)
    assert runner.requests["not scheduled"].block_ids[0] is kept, "additions go to this list"


def test_v1_tables_keep_old_names_until_the_step_before_has_read_them() -> None:
    seen: list[list[int]] = []

    class Read:
        def synchronize(self) -> None:
            (table,) = runner.input_batch.block_table.block_tables
            seen.append(table.block_table.np[0].tolist())

    runner = v1_runner(Read())
    redirect(runner, [BlockMove(7, 1)])
    assert seen == [[7, 3, 9, 7]]


def test_v2_renames_on_the_device_without_moving_the_table() -> None:
    gpu = torch.tensor([[7, 3, 9, 0], [3, 0, 0, 0]], dtype=torch.int32)
    address = gpu.data_ptr()
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=10),
        block_tables=SimpleNamespace(block_tables=[SimpleNamespace(gpu=gpu)]),
    )
    redirect(runner, [BlockMove(7, 1), BlockMove(3, 2)])
    assert gpu.tolist() == [[1, 2, 9, 0], [2, 0, 0, 0]]
    assert gpu.data_ptr() == address, "captured graphs keep this address"


def test_no_move_touches_no_table() -> None:
    redirect(object(), [])
