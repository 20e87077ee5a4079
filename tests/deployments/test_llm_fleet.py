"""A real elastic vLLM engine behind the OpenAI-compatible API of a real cluster."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from dps_deployments.app import build_fleet
from ray import serve

from dps_ray.chaos.faults import Fault
from dps_ray.chaos.load import LoadOptions
from dps_ray.chaos.run import Target, run_chaos
from dps_ray.chaos.verdict import table
from dps_ray.fleet.admission import AdmissionOptions

from .cluster import Cluster
from .fleet import until
from .llm import MAX_BODY_BYTES, MODEL, ask, complete, llm_args, wait_for_mode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[httpx.Client]:
    cluster.run(build_fleet(llm_args()), "llm", "/")
    with httpx.Client(base_url=cluster.url, timeout=120.0) as client:
        yield client
    serve.delete("llm")


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
    before = total(cluster, "tokens_full") + total(cluster, "tokens_fast")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    for _ in range(8):
        with api.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    time.sleep(1.2)

    def made() -> int:
        return total(cluster, "tokens_full") + total(cluster, "tokens_fast") - before

    def free() -> bool:
        return made() >= 8 and not total(cluster, "running") and not total(cluster, "used_blocks")

    until(free, 60.0)
    assert made() < 0.9 * 8 * 200


def test_prompts_headers_and_bodies_are_bounded_at_the_edge(api: httpx.Client) -> None:
    def told(status: int, **request: Any) -> str:
        answer = api.post("/v1/completions", **request)
        assert answer.status_code == status, answer.text
        return str(answer.json()["error"]["message"])

    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    assert "prompt has 5000 characters: at most 4096" in told(
        400, json={**body, "prompt": "x" * 5000}
    )
    assert "prompt has 300 tokens: at most 256" in told(400, json={**body, "prompt": [5] * 300})
    assert "prompt holds 65 prompts: at most 64" in told(400, json={**body, "prompt": ["x"] * 65})
    assert "n asks for 129 answers" in told(400, json={**body, "n": 129})
    long = {"X-DPS-Session": "s" * 300}
    assert "x-dps-session has 300 characters" in told(431, json=body, headers=long)
    assert "header X-Vllm-Priority is 'soon'" in told(
        400, json=body, headers={"X-Vllm-Priority": "soon"}
    )
    many = b" " * MAX_BODY_BYTES
    assert "at most 65536" in told(413, content=many + b"{}")
    pieces = iter([many, many, b"{}"])
    assert "more than 65536 bytes" in told(413, content=pieces)
    assert complete(api)["usage"]["completion_tokens"] >= 1


def test_urgent_requests_are_served_while_others_are_shed(
    api: httpx.Client, cluster: Cluster
) -> None:
    """24 places and a queue of 4 under more requests than that: urgent ones always find room."""
    cluster.configure({"admission": {"max_waiting": 4, "max_retry_after_s": 30}})

    def send(priority: int) -> httpx.Response:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "ignore_eos": True}
        return api.post("/v1/completions", json={**body, "priority": priority})

    low: list[Future[httpx.Response]] = []

    def shed() -> list[httpx.Response]:
        answers = [reply.result() for reply in low if reply.done()]
        return [answer for answer in answers if answer.status_code == 503]

    with ThreadPoolExecutor(60) as pool:

        def overloaded() -> bool:
            while sum(not reply.done() for reply in low) < 50:
                low.append(pool.submit(send, 1))
            return len(shed()) >= 4

        until(overloaded, 120.0)
        high = [pool.submit(send, -1) for _ in range(4)]
        assert [reply.result().status_code for reply in high] == [200] * 4
    cluster.configure({})
    assert len(low) - len(shed()) >= 24
    assert {reply.result().status_code for reply in low} == {200, 503}
    assert all(2 <= int(answer.headers["Retry-After"]) <= 30 for answer in shed())


def total(cluster: Cluster, name: str) -> int:
    """A figure summed over the live replicas."""
    states = [e["state"] for e in cluster.replicas("llm") if e["standing"] == "live"]
    return sum(state[name] for state in states)


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
