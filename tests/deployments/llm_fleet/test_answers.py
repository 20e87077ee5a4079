"""A real elastic vLLM engine behind the OpenAI-compatible API of a real cluster."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dps_ray.fleet.admission import AdmissionOptions

from ..cluster import Cluster
from .llm import MODEL, ask, complete, wait_for_mode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


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
    assert time.monotonic() - started_s < AdmissionOptions().full_wait_s
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


def test_prompt_that_full_precision_could_never_hold_is_refused_and_served_in_any_precision(
    api: httpx.Client,
) -> None:
    body = {"model": MODEL, "prompt": [7] * 240, "max_tokens": 4, "ignore_eos": True}
    for stream in (False, True):
        answer = api.post(
            "/v1/completions", json={**body, "stream": stream}, headers={"X-DPS-Precision": "full"}
        )
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert "dps_precision is 'full'" in message
        assert "this prompt has 240; shorten it, let it run in any precision" in message
    assert api.post("/v1/completions", json=body).raise_for_status().json()["usage"]["dps"]


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
