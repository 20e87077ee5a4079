"""A small HTTP server that speaks the streaming completions protocol, well or badly on demand.

The request's ``max_tokens`` selects the behaviour, so that one server serves every test.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUSY, BROKEN, ERROR_EVENT, CUT, EMPTY, GARBAGE = 901, 902, 903, 904, 905, 906


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        wanted = body["max_tokens"]
        if wanted in (BUSY, BROKEN):
            self._answer(503 if wanted == BUSY else 500, "no capacity")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if wanted == ERROR_EVENT:
            self._event({"error": {"message": "engine died"}})
        elif wanted == GARBAGE:
            self.wfile.write(b"data: {not json}\n\n")
        elif wanted == CUT:
            self._event({"choices": [{"text": "half"}]})
        elif wanted == EMPTY:
            self._usage(body, 0)
        else:
            for _ in range(wanted):
                self._event({"choices": [{"text": "x"}]})
                time.sleep(0.005)
            self._usage(body, wanted)

    def _usage(self, body: dict, tokens: int) -> None:
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def serving(models: tuple[str, ...] = ("tiny",)) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.models, server.bodies = models, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"
