"""One rank by itself: what it says when its memory cannot be had."""

import uuid
from collections.abc import Iterator

import pytest
import torch
from dps_kernels import preferred_layout

from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.engine import rank as ranks
from dps_ray.engine.elastic_worker import ElasticWorker
from dps_ray.engine.rank import Rank
from dps_ray.engine.split_weight import encode_weight, place_fused
from dps_ray.engine.status_page import StatusPage
from dps_ray.memory.geometry import plan_geometry

CPU = torch.device("cpu")


@pytest.fixture
def rank(key: str) -> Iterator[Rank]:
    """This process's rank."""
    yield ranks.begin(DpsOptions(key=key), 0, CPU)
    ranks.end()


@pytest.fixture
def key() -> Iterator[str]:
    key = uuid.uuid4().hex[:16]
    page = StatusPage.create(key)
    yield key
    page.remove()


def test_more_kv_memory_than_the_machine_has_is_one_line_with_a_remedy(key: str) -> None:
    rank = Rank(DpsOptions(key=key), 0, CPU)
    rank.arena.add("layer", torch.zeros(1 << 20, dtype=torch.uint8))
    geometry = plan_geometry(
        kv_bytes=1 << 44, residual_bytes=1 << 20, block_bytes=1 << 20,
        granularity_bytes=rank.arena.driver.granularity_bytes, unit_bytes=None,
    )  # fmt: skip
    with pytest.raises(DpsConfigError) as caught:
        rank.build_region(geometry)
    message = str(caught.value)
    assert message.startswith(f"rank 0 cannot have {geometry.total_bytes} bytes")
    assert "bytes are available" in message
    assert "lower kv_cache_memory_bytes" in message
    assert "\n" not in message
    rank.close()


def test_a_backup_budget_is_obeyed_while_the_model_is_loaded(key: str) -> None:
    rank = Rank(DpsOptions(key=key, backup_budget_bytes=16 << 20), 0, CPU)
    rank.arena.add("small", torch.zeros(1 << 20, dtype=torch.uint8))
    with pytest.raises(DpsConfigError, match="backup_budget_bytes is 16777216"):
        rank.arena.add("large", torch.zeros(16 << 20, dtype=torch.uint8))
    rank.close()


@pytest.mark.parametrize(("columns", "refused"), [(64, False), (40, True)])
def test_layer_outside_the_kernels_is_refused_where_graphs_are_captured(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, columns: int, refused: bool
) -> None:
    # As on a GPU; nothing is computed here.
    monkeypatch.setattr(
        "dps_ray.engine.split_weight.preferred_layout",
        lambda _, *shape: preferred_layout("cuda", *shape),
    )
    rank.captures_graphs = True
    encoded = encode_weight("model.o_proj", torch.ones(32, columns, dtype=torch.float16))
    assert encoded is not None
    if not refused:
        place_fused(encoded)
        return
    with pytest.raises(DpsConfigError) as refusal:
        place_fused(encoded)
    assert str(refusal.value) == (
        "layer model.o_proj does not run in the fused kernels (40 columns are no multiple of 16), "
        "and what replaces them cannot be captured in a CUDA graph: set enforce_eager"
    )
    rank.captures_graphs = False
    place_fused(encoded)


def test_worker_that_failed_before_it_had_a_rank_shuts_down_without_another_error() -> None:
    class Stock:
        ended = False

        def shutdown(self) -> None:
            self.ended = True

    class Worker(ElasticWorker, Stock):
        pass

    ranks.end()
    worker = Worker()
    worker.shutdown()
    assert worker.ended
