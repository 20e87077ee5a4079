"""What ``dps-ray bench layers`` asks of an engine: precision by layers, and the way back."""

import time
from typing import Any

from dps_ray.bench.engines.precision import divergence, score, watched, write
from dps_ray.checks.engine import Engine
from dps_ray.checks.layers import full_layers
from dps_ray.modes import Mode


def by_layers(
    engine: Engine, *, prompts: list[list[int]], tokens: int, seed: int, choices: int
) -> dict[str, Any]:
    """Divergence from the 16-bit model with the first layers in full precision, more and more.

    The static engine writes the texts itself, all layers full; the divergence is taken at every
    position it wrote.
    """
    count = engine.scheduler.sum_manager.layers.count
    with full_layers(engine, range(count)):
        texts = write(engine, prompts, tokens, seed)
        references = [score(engine, text)[-tokens:] for text in texts]
    rows = []
    for back in sorted({round(count * part / choices) for part in range(choices + 1)}):
        found, agreed = [], []
        with full_layers(engine, range(back)):
            for text, reference in zip(texts, references, strict=True):
                ours = score(engine, text)[-tokens:]
                found.append(float(divergence(reference, ours).mean()))
                same = reference.argmax(-1) == ours.argmax(-1)
                agreed.append(float(same.float().mean()))
        rows.append({"layers": back, "kl": found, "same_token": agreed})
    return {"layers": count, "rows": rows}


def way_back(
    engine: Engine,
    *,
    residents: list[list[int]],
    fillers: list[list[int]],
    filler_tokens: int,
    steps_after: int,
) -> dict[str, Any]:
    """A burst that takes all weight memory, and what residents generate from its end on.

    For every step since: when it ended, how many layers were full, and each resident's divergence
    from the 16-bit model, which reads the same tokens afterwards.
    """
    engine.return_to_full()
    names = engine.start(residents, engine.spec.max_model_len - len(residents[0]))
    while any(not request.num_output_tokens for request in _running(engine, names)):
        engine.step()
    engine.finish(engine.start(fillers, filler_tokens))
    began_s = time.perf_counter()
    points: list[dict[str, Any]] = []
    made = []
    with watched(engine) as kept:
        while steps_after:
            lengths = {
                request.request_id: request.num_tokens for request in _running(engine, names)
            }
            kept.clear()
            engine.step()
            full = engine.scheduler.mode is Mode.FULL
            steps_after -= full
            layers = engine.scheduler.sum_manager.layers
            points.append(
                {
                    "time_s": time.perf_counter() - began_s,
                    "full": full,
                    "layers_full": layers.count_full,
                }
            )
            (rows,) = kept
            made.append((lengths, dict(zip(rows.requests, rows.logprobs, strict=True))))
    texts = {r.request_id: list(r.all_token_ids) for r in _running(engine, names)}
    engine.llm.llm_engine.abort_request(names)
    engine.step()
    for name, text in texts.items():
        reference = score(engine, text)
        for point, (lengths, logprobs) in zip(points, made, strict=True):
            found = divergence(reference[lengths[name] - 1], logprobs[name])
            point.setdefault("kl", []).append(float(found))
    return {"points": points, "layers": engine.scheduler.sum_manager.layers.count}


def _running(engine: Engine, names: list[str]) -> list[Any]:
    """The scheduler's view of the named requests; vLLM adds a random suffix to each name."""
    requests = engine.scheduler.requests.values()
    return [request for request in requests if request.request_id.rpartition("-")[0] in names]
