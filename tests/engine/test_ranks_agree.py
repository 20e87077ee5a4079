"""Ranks with unequal memory plan with the least of it."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from dps_ray.engine.ranks_agree import least_of_ranks

FREE_BYTES = (5 << 33, (3 << 33) + 1)


def ask(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(FREE_BYTES)
    )
    assert dist.group.WORLD is not None
    least = least_of_ranks(FREE_BYTES[rank], dist.group.WORLD)
    Path(folder, str(rank)).write_text(str(least))
    dist.destroy_process_group()


def test_every_rank_gets_the_least_any_rank_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The spawned ranks import this module by its name, and inherit the path.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    mp.spawn(ask, (str(tmp_path),), len(FREE_BYTES))
    told = [int((tmp_path / str(rank)).read_text()) for rank in range(len(FREE_BYTES))]
    assert told == [min(FREE_BYTES)] * 2
