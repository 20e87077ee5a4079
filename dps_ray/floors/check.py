"""``dps-ray check floors``: do clients of a fleet get the precision they insist on?"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from dps_ray.chaos.fleet import MODEL, START_TIMEOUT_S, tiny_fleet
from dps_ray.checks.process import run_engines
from dps_ray.checks.specs import AMPLE_KV_BYTES, BLOCK_TOKENS, EXACT, EngineSpec, block_bytes
from dps_ray.config import DpsConfigError
from dps_ray.demo.fleet import running_fleet
from dps_ray.floors.clients import FloorLoad, ask_fleet
from dps_ray.floors.verdict import judge, table
from dps_ray.models.tiny import make_tiny
from dps_ray.report import Report

BASE_BLOCKS = 24
"""KV blocks of a replica in full mode: its part of a wave asks for several times as much."""


def check_fleet_floors(
    root: Path, load: FloorLoad, *, replicas: int, say: Callable[[str], None]
) -> Report:
    """Ask a fleet and a static 16-bit engine the same, and compare.

    Parameters
    ----------
    root
        Folder of the tiny model.
    load
        What the clients send.
    replicas
        Size of the fleet.
    say
        Gets lines for people.

    Raises
    ------
    DpsConfigError
        There are fewer requests than two waves.
    FleetError
        The fleet does not start, or something of it could not be stopped.
    """
    if load.requests < 2 * load.wave:
        raise DpsConfigError(
            f"requests is {load.requests}: give at least {2 * load.wave}, a wave that begins with "
            "those who insist and one that ends with them"
        )
    report = Report("check floors")
    model = make_tiny("qwen3", root)
    reference = sixteen_bit_answers(model, load)
    say(f"{load.requests} answers of a static 16-bit engine")
    config = tiny_fleet(
        replicas,
        engine={
            "kv_cache_memory_bytes": BASE_BLOCKS * block_bytes(model),
            "additional_config": {"dps": EXACT},
        },
    )
    with running_fleet(config, str(model)) as fleet:
        fleet.wait_until_ready(START_TIMEOUT_S, lambda text: say(f"... {text}"))
        outcome = asyncio.run(ask_fleet(fleet.url, MODEL, load, say))
    judge(report, outcome, reference, load.max_tokens)
    say(table(report))
    return report


def sixteen_bit_answers(model: Path, load: FloorLoad) -> list[list[int]]:
    """Tokens of vLLM's own engine and linear layers: nothing is elastic or nested in it."""
    spec = EngineSpec(
        label="16 bit",
        model=str(model),
        kv_bytes=AMPLE_KV_BYTES,
        max_model_len=256,
        max_num_seqs=64,
        block_size=BLOCK_TOKENS,
        scenario="floor_answers",
        arguments={"count": load.requests, "max_tokens": load.max_tokens},
    )
    (answers,) = run_engines([spec])
    tokens: list[list[int]] = answers["tokens"]
    return tokens
