"""Plain vLLM loads the prepared models under their checkpoint names and generates from them."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dps_ray.models.smollm2 import prepare_smollm2
from dps_ray.models.tiny import TINY, make_tiny

pytestmark = pytest.mark.engine

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
for model, prompt, chat, max_tokens in json.loads(sys.argv[1]):
    llm = LLM(model=model, enforce_eager=True, kv_cache_memory_bytes=32 << 20, max_model_len=512,
              block_size=32)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=1)
    messages = [{"role": "user", "content": prompt}]
    output = llm.chat(messages, params) if chat else llm.generate(prompt, params)
    completion = output[0].outputs[0]
    print("RESULT" + json.dumps({
        "text": completion.text,
        "tokens": list(completion.token_ids),
        "logprob": next(iter(completion.logprobs[0].values())).logprob,
    }), flush=True)
    del llm
    cleanup_dist_env_and_memory()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """First tokens of every model, from one process: importing vLLM costs more than a model."""
    pytest.importorskip("gguf")
    root = tmp_path_factory.mktemp("models")
    jobs = {name: (make_tiny(name, root), "hello world", False, 8) for name in TINY}
    jobs["smollm2"] = (prepare_smollm2(root), "What is the capital of France?", True, 12)
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "none",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = json.dumps([[str(model), *rest] for model, *rest in jobs.values()])
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == len(jobs), done.stderr[-3000:]
    return dict(zip(jobs, (json.loads(line.removeprefix("RESULT")) for line in lines), strict=True))


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_loads_and_generates(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert len(result["tokens"]) == 8 or result["tokens"][-1] == 0
    # Neither uniform (log 1/512 = -6.2) nor a NaN.
    assert -5.0 < result["logprob"] < 0.0


def test_smollm2_answers_a_question_in_english(results: dict[str, dict[str, Any]]) -> None:
    assert "Paris" in results["smollm2"]["text"]
