"""The part of ``check engine`` about cached prefixes: which ones did fast mode write?"""

from dataclasses import replace
from pathlib import Path

from dps_ray.checks.move_check import LOAD_BASE_BLOCKS
from dps_ray.checks.parts import Part, Results, Say
from dps_ray.checks.specs import BLOCK_TOKENS, EXACT, EngineSpec, block_bytes
from dps_ray.report import Report

PROMPT_TOKENS = 5 * BLOCK_TOKENS
REUSABLE_TOKENS = 4 * BLOCK_TOKENS
"""The block with the last token is computed anyway, for its logits."""


def check_prefixes(folder: Path) -> Part:
    """Ask the same prompt in fast and in full mode, under both policies."""
    allow = EngineSpec(
        label="prefixes",
        model=str(folder),
        kv_bytes=LOAD_BASE_BLOCKS * block_bytes(folder),
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        dps={**EXACT, "reuse_fast_prefixes": "allow"},
        scenario="prefixes",
        arguments={"prompt_tokens": PROMPT_TOKENS},
    )
    recompute = replace(allow, dps={**EXACT, "reuse_fast_prefixes": "recompute"})

    def judge(report: Report, say: Say, runs: Results) -> None:
        for policy, run in zip(("allow", "recompute"), runs, strict=True):
            fresh = run["full, nothing cached"]["output"]
            floor = run["full, floor"]
            report.check(
                f"prefixes, {policy}: a floor of full precision reuses nothing fast mode wrote",
                floor["output"] == fresh
                and floor["cached_tokens"] == (0 if policy == "allow" else REUSABLE_TOKENS),
            )
            report.check(
                f"prefixes, {policy}: a floor of full precision reuses what full mode wrote",
                run["full, floor again"]["cached_tokens"] == REUSABLE_TOKENS,
            )
        allowed, recomputed = runs
        report.check(
            "prefixes, allow: full mode reuses a prefix that fast mode wrote",
            allowed["full"]["cached_tokens"] == REUSABLE_TOKENS,
        )
        report.check(
            "prefixes, allow: the reused prefix shows in the logprobs",
            allowed["full"]["output"] != allowed["full, nothing cached"]["output"],
        )
        report.check(
            "prefixes, recompute: full mode equals a run with nothing cached",
            recomputed["full"]["cached_tokens"] == 0
            and recomputed["full"]["output"] == recomputed["full, nothing cached"]["output"],
        )
        tokens = {
            policy: {name: answer["cached_tokens"] for name, answer in run.items()}
            for policy, run in zip(("allow", "recompute"), runs, strict=True)
        }
        report.figures["prefixes"] = {"cached_tokens": tokens}
        say(f"prefixes: cached tokens {tokens}")

    return Part([allow, recompute], judge)
