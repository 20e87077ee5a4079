"""How requests under chaos end, against a server that answers byte by byte what it is told to."""

import asyncio

import pytest

from dps_ray.chaos.load import Ending, Load, LoadOptions, Record

CHUNK = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
ERROR = b'data: {"error":{"message":"the replica died"}}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = b'{"usage":{"completion_tokens":3}}'
HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PATIENCE_S = 60.0
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


def ended(
    *answers: bytes | None, stream: bool, hold: bool = False, deadline_s: float = PATIENCE_S
) -> Record:
    """How a request ends whose connections are answered with these bytes, in turn, and closed."""

    async def run() -> Record:
        left = list(answers)
        records: list[Record] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer is not None:
                writer.write(answer)
                await writer.drain()
            if hold:
                await asyncio.sleep(PATIENCE_S)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        options = LoadOptions(
            clients=1,
            deadline_s=deadline_s,
            output_tokens=(3, 3),
            stream_share=float(stream),
        )
        load = Load(f"http://{host}:{port}", "model", options)
        async with load.running():
            while not load.records:
                await asyncio.sleep(0.01)
        records = load.records
        server.close()
        return records[0]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "ending"),
    [
        (HEADER + 3 * CHUNK + USAGE + DONE, Ending.OK),
        (HEADER + CHUNK + USAGE + DONE, Ending.OK),
        (HEADER + CHUNK + DONE, Ending.WRONG),
        (HEADER + 3 * CHUNK + DONE, Ending.WRONG),
        (HEADER + CHUNK + USAGE.replace(b"3", b"1") + DONE, Ending.WRONG),
        (HEADER + 4 * CHUNK + USAGE + DONE, Ending.WRONG),
        (HEADER + DONE, Ending.WRONG),
        (HEADER + CHUNK, Ending.CUT),
        (HEADER + CHUNK + ERROR + DONE, Ending.ERROR),
        (HEADER + ERROR + DONE, Ending.LOST),
        (REFUSAL, Ending.LOST),
    ],
)
def test_end_of_a_stream_is_told_apart(answer: bytes, ending: Ending) -> None:
    assert ended(answer, stream=True).ending is ending


def test_answer_with_fewer_tokens_than_asked_for_is_wrong() -> None:
    assert ended(HEADER + WHOLE, stream=False).ending is Ending.OK
    short = WHOLE.replace(b"3", b"2")
    assert ended(HEADER + short, stream=False).ending is Ending.WRONG


@pytest.mark.parametrize("stream", [True, False])
def test_connection_that_breaks_before_any_byte_is_tried_again(stream: bool) -> None:
    answer = HEADER + (3 * CHUNK + USAGE + DONE if stream else WHOLE)
    record = ended(None, answer, stream=stream)
    assert (record.ending, record.resent) == (Ending.OK, 1)


@pytest.mark.parametrize("stream", [True, False])
def test_request_without_an_end_is_hung_at_its_deadline(stream: bool) -> None:
    record = ended(HEADER + CHUNK, stream=stream, hold=True, deadline_s=0.5)
    assert record.ending is Ending.HUNG
    assert 0.5 <= record.ended_s - record.started_s < PATIENCE_S
