"""The load generator keeps the schedule, times every piece and names every failure."""

import asyncio
import json
from pathlib import Path
from typing import cast

import pytest

from dps_ray.bench.client import ClientOptions, CompletionClient, open_http, served_model
from dps_ray.bench.prompts import prompt_maker, token_id_prompts, word_prompts
from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.bench.replay import replay
from dps_ray.bench.traces import TraceRequest
from dps_ray.cli.main import main
from dps_ray.config import DpsConfigError

from .. import played_time
from .completion_server import BROKEN, BUSY, CUT, EMPTY, ERROR_EVENT, GARBAGE, serving, url_of


def run(trace: list[TraceRequest], url: str) -> list[RequestRecord]:
    async def session() -> list[RequestRecord]:
        async with open_http(url) as http:
            client = CompletionClient(http, ClientOptions("tiny", request_timeout_s=60.0))
            return await replay(trace, client, token_id_prompts(seed=0))

    return asyncio.run(session())


def test_answers_are_timed_piece_by_piece_and_counted_by_the_server() -> None:
    with serving() as server:
        (record,) = run([TraceRequest(0.0, 7, 4)], url_of(server))
    assert record.outcome is Outcome.OK
    assert (record.prompt_tokens, record.output_tokens) == (7, 4)
    assert len(record.chunk_times_s) == 4
    assert record.end_s is not None
    assert record.end_s >= record.chunk_times_s[-1]
    assert record.sent_s <= record.chunk_times_s[0]


def test_requests_ask_for_the_traces_lengths_and_never_stop_early() -> None:
    with serving() as server:
        run([TraceRequest(0.0, 7, 4)], url_of(server))
        (body,) = server.bodies
    assert len(body["prompt"]) == 7
    assert body["max_tokens"] == 4
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("behaviour", "outcome", "reason"),
    [
        (BUSY, Outcome.REJECTED, "HTTP 503"),
        (BROKEN, Outcome.FAILED, "HTTP 500"),
        (ERROR_EVENT, Outcome.FAILED, "engine died"),
        (CUT, Outcome.FAILED, "ended early"),
        (EMPTY, Outcome.FAILED, "no token"),
        (GARBAGE, Outcome.FAILED, "JSONDecodeError"),
    ],
)
def test_each_way_to_fail_has_its_outcome_and_reason(
    behaviour: int, outcome: Outcome, reason: str
) -> None:
    with serving() as server:
        (record,) = run([TraceRequest(0.0, 3, behaviour)], url_of(server))
    assert record.outcome is outcome
    assert record.reason is not None
    assert reason in record.reason
    assert record.end_s is not None


def test_unreachable_server_is_a_failure_not_an_exception() -> None:
    with serving() as server:
        url = url_of(server)
    (record,) = run([TraceRequest(0.0, 3, 2)], url)
    assert record.outcome is Outcome.FAILED
    assert "ConnectError" in (record.reason or "")


def test_arrivals_keep_the_trace_schedule_while_earlier_answers_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = [TraceRequest(0.1 * index, 2, 40) for index in range(4)]

    class Slow:
        async def complete(self, record: RequestRecord, prompt: object, origin_s: float) -> None:
            await asyncio.sleep(60.0)

    async def session() -> list[RequestRecord]:
        clock = asyncio.get_running_loop().time
        return await replay(
            trace, cast(CompletionClient, Slow()), token_id_prompts(seed=0), clock=clock
        )

    sent_s = [record.sent_s for record in played_time.run(monkeypatch, session())]
    assert sent_s == pytest.approx([request.arrival_s for request in trace])


def test_only_model_is_found_and_several_need_a_choice() -> None:
    async def name(url: str) -> str:
        async with open_http(url + "/v1/") as http:
            return await served_model(http)

    with serving() as server:
        assert asyncio.run(name(url_of(server))) == "tiny"
    with serving(models=("one", "two")) as server, pytest.raises(DpsConfigError, match="--model"):
        asyncio.run(name(url_of(server)))
    with pytest.raises(DpsConfigError, match="no server answers"):
        asyncio.run(name(url_of(server)))


@pytest.mark.parametrize("kind", ["ids", "words"])
def test_prompts_have_the_wanted_length_are_seeded_and_all_differ(kind: str) -> None:
    first, again = prompt_maker(kind, seed=1), prompt_maker(kind, seed=1)
    prompts = [first(index, 20) for index in range(10)]
    assert prompts == [again(index, 20) for index in range(10)]
    assert len({str(prompt) for prompt in prompts}) == 10
    assert len(token_id_prompts(0)(0, 33)) == 33
    assert len(str(word_prompts(0)(0, 33)).split()) == 33


def test_command_replays_a_window_and_writes_figures_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        arguments = ["bench", "replay", "azure-2023-code-excerpt", "--url", url_of(server)]
        arguments += ["--start-s", "30", "--end-s", "60", "--speed", "50", "--max-requests", "5"]
        arguments += ["--max-prompt-tokens", "64", "--max-output-tokens", "4"]
        status = main([*arguments, "--json", "--out", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out)
    assert status == 0
    assert printed["ok"] is True
    assert printed["requests"] == {"sent": 5, "ok": 5, "failed": 0, "rejected": 0}
    assert json.loads((tmp_path / "summary.json").read_text())["requests"]["ok"] == 5
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(5))


def test_command_fails_when_a_request_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n0,3,2\n0,3,{BUSY}\n")
    with serving() as server:
        status = main(["bench", "replay", str(path), "--url", url_of(server), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert status == 1
    assert printed["ok"] is False
    assert printed["requests"]["rejected"] == 1


def test_command_names_a_wrong_option_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "replay", "azure-2023-code-excerpt", "--url", "http://127.0.0.1:9"]
    assert main([*arguments, "--speed", "0"]) == 2
    said = capsys.readouterr().err
    assert said == "dps-ray bench replay: --speed is 0: give a number above 0\n"
