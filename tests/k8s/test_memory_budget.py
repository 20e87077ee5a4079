"""A worker's memory limit covers what a replica pins, shares and runs."""

import re
from typing import Any

import pytest

GIB = 2**30
UNITS = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": GIB,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
}
PROCESSES_BYTES = 12 * GIB
"""CUDA context, engine, replica, HTTP proxy and raylet: an allowance, not a measurement."""
MONITOR_THRESHOLD = 0.95
"""Share of the limit at which Ray's memory monitor kills: ``RAY_memory_usage_threshold``."""


def quantity_bytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", quantity)
    assert match is not None, f"{quantity} is not a whole quantity"
    return int(match[1]) * UNITS[match[2]]


def qwen3_moe_parameters(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
    expert_hidden: int,
    vocabulary: int,
) -> int:
    """Count the weights of a Qwen3 mixture-of-experts model with untied embeddings."""
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    feed_forward = experts * 3 * hidden * expert_hidden + hidden * experts
    norms = 2 * hidden + 2 * head_dim
    return layers * (attention + feed_forward + norms) + 2 * vocabulary * hidden + hidden


@pytest.fixture(scope="module")
def backup_bytes() -> int:
    """Half of the 16-bit weights of Qwen3-30B-A3B: one byte a parameter, at most.

    The shape is that of the checkpoint's ``config.json``. Weights that stay whole are not backed
    up, so counting every parameter errs on the safe side.
    """
    parameters = qwen3_moe_parameters(
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        expert_hidden=768,
        vocabulary=151_936,
    )
    assert parameters == 30_532_122_624
    return parameters


@pytest.fixture
def worker_group(rayservice: dict[str, Any]) -> dict[str, Any]:
    (group,) = rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert isinstance(group, dict)
    return group


def shm_bytes(group: dict[str, Any]) -> int:
    pod = group["template"]["spec"]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    return quantity_bytes(volume["emptyDir"]["sizeLimit"])


def spare_bytes(group: dict[str, Any], backup_bytes: int) -> float:
    """What the limit leaves below the memory monitor's threshold; negative when it is too small."""
    (container,) = group["template"]["spec"]["containers"]
    limit = quantity_bytes(container["resources"]["limits"]["memory"])
    replicas = int(container["resources"]["limits"]["nvidia.com/gpu"])
    object_store = int(group["rayStartParams"]["object-store-memory"])
    needed = replicas * (backup_bytes + PROCESSES_BYTES) + shm_bytes(group) + object_store
    return MONITOR_THRESHOLD * limit - needed


def test_limit_holds_backup_shared_memory_object_store_and_processes(
    worker_group: dict[str, Any], backup_bytes: int
) -> None:
    assert spare_bytes(worker_group, backup_bytes) > 0


def test_limit_sized_without_the_backup_is_found_too_small(
    worker_group: dict[str, Any], backup_bytes: int
) -> None:
    worker_group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "32Gi"
    assert spare_bytes(worker_group, backup_bytes) < 0


def test_second_gpu_on_the_same_limit_is_found_too_small(
    worker_group: dict[str, Any], backup_bytes: int
) -> None:
    limits = worker_group["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["nvidia.com/gpu"] = "2"
    assert spare_bytes(worker_group, backup_bytes) < 0


def test_pinned_memory_is_requested_in_full(worker_group: dict[str, Any]) -> None:
    resources = worker_group["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]


def test_object_store_fits_in_shared_memory(worker_group: dict[str, Any]) -> None:
    assert int(worker_group["rayStartParams"]["object-store-memory"]) < shm_bytes(worker_group)


def test_checkpoint_fits_in_its_volume_and_the_volume_in_the_pod(
    worker_group: dict[str, Any], backup_bytes: int
) -> None:
    pod = worker_group["template"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "models"]
    size = quantity_bytes(volume["emptyDir"]["sizeLimit"])
    storage = pod["containers"][0]["resources"]["limits"]["ephemeral-storage"]
    assert 2 * backup_bytes < size < quantity_bytes(storage)
