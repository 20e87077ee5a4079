"""A real elastic vLLM engine behind the OpenAI-compatible API of a real cluster."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from dps_deployments.app import build_fleet
from ray import serve

from dps_ray.checks.chaos.faults import Fault
from dps_ray.checks.chaos.load import LoadOptions
from dps_ray.checks.chaos.run import Target, run_chaos
from dps_ray.checks.chaos.verdict import table
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

from .cheap import CONTROLLER_APP
from .conftest import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

MODEL = "tiny"
BASE_KV_BYTES = 16 * 65536
"""Sixteen blocks of 32 tokens: five requests of four blocks do not fit."""


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[httpx.Client]:
    folder = make_tiny("qwen3", cache_root())
    args: dict[str, Any] = {
        "controller_app": CONTROLLER_APP,
        "llm_config": {
            "model_loading_config": {"model_id": MODEL, "model_source": str(folder)},
            "accelerator_config": {"kind": "cpu"},
            "placement_group_config": {"bundles": [{"CPU": 1}]},
            "runtime_env": {
                "env_vars": {
                    "OMP_NUM_THREADS": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "HF_HUB_OFFLINE": "1",
                }
            },
            "engine_kwargs": {
                "enforce_eager": True,
                "max_model_len": 256,
                "max_num_seqs": 16,
                "block_size": 32,
                "kv_cache_memory_bytes": BASE_KV_BYTES,
                "quantization": "dps",
                "additional_config": {"dps": {"min_fast_dwell_s": 0.0}},
            },
            "deployment_config": {
                "num_replicas": 2,
                "max_ongoing_requests": 64,
                "ray_actor_options": {"num_cpus": 0},
                "health_check_period_s": 1,
            },
        },
        "ingress": {
            "num_replicas": 1,
            "max_ongoing_requests": 64,
            "ray_actor_options": {"num_cpus": 0},
        },
    }
    serve.run(build_fleet(args), name="llm", route_prefix="/")
    with httpx.Client(base_url=cluster.url, timeout=120.0) as client:
        yield client
    serve.delete("llm")


def complete(api: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 8, **fields}
    return dict(api.post("/v1/completions", json=body).raise_for_status().json())


def test_model_is_listed(api: httpx.Client) -> None:
    models = api.get("/v1/models").raise_for_status().json()["data"]
    assert MODEL in [model["id"] for model in models]


def test_completion_has_the_tokens_asked_for(api: httpx.Client) -> None:
    assert complete(api, ignore_eos=True)["usage"]["completion_tokens"] == 8


def test_chat_answers_as_the_assistant(api: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
    }
    reply = api.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert reply["choices"][0]["message"]["role"] == "assistant"


def test_stream_ends_with_done_and_gives_the_same_text(api: httpx.Client) -> None:
    whole = complete(api, temperature=0)["choices"][0]["text"]
    body = {
        "model": MODEL,
        "prompt": "def add(a, b):",
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    with api.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == whole


def ask(api: httpx.Client, **headers: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 8, "ignore_eos": True}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return api.post("/v1/completions", json=body, headers=named)


def test_response_tells_which_mode_made_its_tokens(api: httpx.Client) -> None:
    answer = ask(api, X_DPS_Precision="full").raise_for_status()
    assert answer.json()["usage"]["dps"] == {"tokens_full": 8, "tokens_fast": 0}
    assert (answer.headers["X-DPS-Tokens-Full"], answer.headers["X-DPS-Tokens-Fast"]) == ("8", "0")


def test_last_chunk_of_a_stream_tells_which_mode_made_its_tokens(api: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
    }
    with api.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    (told,) = [chunk["dps"] for chunk in chunks if "dps" in chunk]
    assert told == {"tokens_full": told["tokens_full"], "tokens_fast": 0}
    assert 1 <= told["tokens_full"] <= 4


def test_unknown_precision_is_refused_with_the_choices(api: httpx.Client) -> None:
    answer = ask(api, X_DPS_Precision="half")
    assert answer.status_code == 400
    assert "give one of any, prefer-full, full" in answer.json()["error"]["message"]


def test_request_that_insists_on_full_precision_is_refused_in_its_time_and_served_later(
    api: httpx.Client, cluster: Cluster
) -> None:
    cluster.configure({"pins": {"*": "fast"}})
    wait_for_mode(cluster, "fast")
    started_s = time.monotonic()
    answer = ask(api, X_DPS_Precision="full", X_DPS_Wait_S="0.5")
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert time.monotonic() - started_s < 3.0
    assert ask(api).raise_for_status().json()["usage"]["dps"] == {
        "tokens_full": 0,
        "tokens_fast": 8,
    }
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, api, X_DPS_Precision="full", X_DPS_Wait_S="30")
        time.sleep(0.3)
        cluster.configure({})
        answer = waiting.result().raise_for_status()
    assert answer.json()["usage"]["dps"] == {"tokens_full": 8, "tokens_fast": 0}


def wait_for_mode(cluster: Cluster, mode: str) -> None:
    """Wait until every live replica is in ``mode``."""
    deadline_s = time.monotonic() + 30.0
    while {
        entry["state"]["mode"] for entry in cluster.replicas("llm") if entry["standing"] == "live"
    } != {mode}:
        assert time.monotonic() < deadline_s, f"replicas that are not in {mode} mode"
        time.sleep(0.1)


def test_burst_goes_fast_and_the_controller_sees_it_come_back(
    api: httpx.Client, cluster: Cluster
) -> None:
    def long_request(seed: int) -> dict[str, Any]:
        return complete(
            api, prompt=[3 + seed + token for token in range(90)], max_tokens=30, ignore_eos=True
        )

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(long_request, range(12)))
    assert [reply["usage"]["completion_tokens"] for reply in replies] == [30] * 12
    deadline_s = time.monotonic() + 60.0
    while True:
        states = [entry["state"] for entry in cluster.replicas("llm")]
        back = [
            state
            for state in states
            if state["mode"] == "full" and state["tokens_fast"] and state["switches_to_full"]
        ]
        if back:
            break
        assert time.monotonic() < deadline_s, f"no replica came back: {states}"
        time.sleep(0.1)
    assert all(state["switches_to_fast"] >= 1 for state in back)


def test_client_that_leaves_frees_its_blocks_before_its_answer_is_complete(
    api: httpx.Client, cluster: Cluster
) -> None:
    def totals(name: str) -> int:
        states = [e["state"] for e in cluster.replicas("llm") if e["standing"] == "live"]
        return sum(state[name] for state in states)

    before = totals("tokens_full") + totals("tokens_fast")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    for _ in range(8):
        with api.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    deadline_s = time.monotonic() + 20.0
    while totals("running") or totals("used_blocks"):
        assert time.monotonic() < deadline_s, "blocks of clients that left are still held"
        time.sleep(0.1)
    time.sleep(1.2)
    made = totals("tokens_full") + totals("tokens_fast") - before
    assert 8 <= made < 8 * 200 / 2


def test_killed_engine_and_killed_controller_cost_no_request(
    api: httpx.Client, cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """What had no token is answered by the other replica; what had some ends with a clear error."""

    def processes() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    report = asyncio.run(
        run_chaos(
            Target(cluster.url, MODEL, 2, processes),
            [Fault.ENGINE, Fault.CONTROLLER],
            duration_s=0.0,
            load=LoadOptions(clients=12, wave_s=4.0, calm_s=2.0, output_tokens=(30, 60)),
            seed=0,
            settle_s=2.0,
            say=print,
        )
    )
    print(table(report))
    record_property("faults", report.figures["faults"])
    assert report.ok, report.as_dict()
