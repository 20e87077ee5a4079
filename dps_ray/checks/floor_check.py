"""Do requests that insist on full precision get it? Judged beside a static 16-bit engine."""

from pathlib import Path
from typing import Any

from dps_ray.checks.parts import Part, Results, Say
from dps_ray.checks.specs import AMPLE_KV_BYTES, BLOCK_TOKENS, EXACT, EngineSpec, block_bytes
from dps_ray.report import Report

BASE_BLOCKS = 24
"""A wave of requests asks for several times as much."""


def check_floors(folder: Path, requests: int) -> Part:
    """The same requests on a static 16-bit and on an elastic engine.

    Parameters
    ----------
    folder
        The model.
    requests
        Requests over all waves.
    """
    options: dict[str, Any] = {
        "model": str(folder),
        "max_model_len": 512,
        "max_num_seqs": 64,
        "block_size": BLOCK_TOKENS,
        "scenario": "floors",
        "arguments": {"count": requests},
    }
    small = BASE_BLOCKS * block_bytes(folder)
    specs = [
        EngineSpec(label="floors: plain", kv_bytes=AMPLE_KV_BYTES, **options),
        EngineSpec(label="floors: dps", kv_bytes=small, dps=EXACT, **options),
    ]

    def judge(report: Report, say: Say, runs: Results) -> None:
        plain, elastic = runs
        report.check(
            "floors: every request that insists on full precision equals the 16-bit engine's",
            plain["tokens"] == elastic["tokens"],
        )
        report.check(
            "floors: none of their tokens was made in fast mode",
            elastic["insisting_fast_tokens"] == 0 and elastic["insisting_full_tokens"] > 0,
        )
        report.check("floors: all requests ended", elastic["finished"] == requests)
        report.check("floors: the others went fast", elastic["tokens_fast"] > 0)
        report.figures["floors"] = {
            "requests": requests,
            "insisting": len(plain["tokens"]),
            **{name: value for name, value in elastic.items() if name != "tokens"},
        }
        say(
            f"floors: {len(plain['tokens'])} of {requests} requests insist on full precision; "
            f"{elastic['tokens_fast']} tokens of the others in fast mode"
        )

    return Part(specs, judge)
