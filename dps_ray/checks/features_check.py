"""The part of ``check engine`` about vLLM's features: they work while memory is lent and returned.

One elastic engine runs many of them at once; a static engine's worker then gets the same orders.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dps_ray.checks.parts import Part, Results, Say
from dps_ray.checks.specs import BLOCK_TOKENS, EXACT, EngineSpec, block_bytes
from dps_ray.report import Report

BASE_BLOCKS = 24
STEP_TOKENS = 128
"""Less than most prompts have: they are computed in chunks."""
WINDOW_TOKENS = 64


def check_features(folder: Path, home: Path) -> list[Part]:
    """Features on full attention, then on layers of two kinds with an FP8 KV cache.

    Parameters
    ----------
    folder
        The tiny ``qwen3``.
    home
        Folder for tapes and the second model.
    """
    hybrid = _spec(
        write_hybrid(folder, home / "hybrid"),
        str(home / "features-hybrid"),
        BASE_BLOCKS // 2,
        waves=1,
    )
    name = "features, sliding window"
    # vLLM has no kernel for it on a lesser CPU, and says so when it starts.
    if torch.cpu._is_avx512_supported():
        hybrid.engine_arguments["kv_cache_dtype"] = "fp8"
        name += ", FP8 KV cache"
    return [
        _part("features", _spec(folder, str(home / "features")), preempts=True),
        _part(name, hybrid, preempts=False),
    ]


def _part(name: str, spec: EngineSpec, *, preempts: bool) -> Part:
    def judge(report: Report, say: Say, runs: Results) -> None:
        run, again = runs
        _judge(report, name, run, again)
        if preempts:
            report.check(f"{name}: requests were preempted", run["preemptions"] > 0)
        say(
            f"{name}: steps {run['steps']}, {run['preemptions']} preemptions, "
            f"{run['units_lent']} units lent, {run['blocks_moved']} blocks moved"
        )

    return Part([spec, _static(spec)], judge)


def write_hybrid(folder: Path, target: Path) -> Path:
    """A model of the same weights in which every other layer sees a sliding window only."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    kinds = ("sliding_attention", "full_attention")
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "sliding_window": WINDOW_TOKENS,
        "layer_types": [kinds[layer % 2] for layer in range(layers)],
    }
    tensors = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not key.endswith("_norm.weight")}
    kept |= {key: value for key, value in tensors.items() if "layernorm" in key}
    kept["model.norm.weight"] = tensors["model.norm.weight"]
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def _spec(folder: Path, tape: str, base_blocks: int = BASE_BLOCKS, **arguments: int) -> EngineSpec:
    return EngineSpec(
        label=f"features: {folder.name}",
        model=str(folder),
        kv_bytes=base_blocks * block_bytes(folder),
        max_model_len=1024,
        max_num_batched_tokens=STEP_TOKENS,
        block_size=BLOCK_TOKENS,
        dps=EXACT,
        scenario="features",
        arguments={"tape": tape, **arguments},
        engine_arguments={"scheduling_policy": "priority"},
    )


def _static(spec: EngineSpec) -> EngineSpec:
    return replace(
        spec,
        label=f"{spec.label}, again",
        kv_bytes=8 * spec.kv_bytes,
        dps={**EXACT, "lend": False},
        scenario="replay",
        arguments={"tape": spec.arguments["tape"], "controls": True},
    )


def _judge(report: Report, name: str, run: dict[str, Any], again: dict[str, Any]) -> None:
    report.check(
        f"{name}: every step equals the same orders on static memory, to the last bit",
        again["steps"] > 0 and not again["different"] and again["blocks"] >= run["blocks"],
    )
    for difference, noticed in again["noticed"].items():
        report.check(f"{name}: {difference} makes that comparison fail", noticed)
    report.check(
        f"{name}: memory was lent, and blocks moved", run["units_lent"] > 0 < run["blocks_moved"]
    )
    report.check(f"{name}: full mode returned after every wave", run["returned"] == run["waves"])
    report.check(
        f"{name}: the restored residual equals the backup",
        all(rank["residual_intact"] and rank["restored_bytes"] for rank in run["ranks"]),
    )
    report.check(f"{name}: both modes ran", all(run["steps"].values()))
    report.check(f"{name}: prefixes were reused", run["cached_tokens"] > 0)
    report.check(f"{name}: prompts were computed in chunks", run["chunked_prompts"] > 0)
    report.check(f"{name}: urgent requests overtook others", run["overtaken"] > 0)
    report.check(f"{name}: a beam search found sequences", run["beams"] >= 4)
    for kind, (right, count) in run["kinds"].items():
        report.check(f"{name}: {kind}", right == count > 0)
    report.figures[name] = run
