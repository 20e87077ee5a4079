"""Engines in processes of their own that stay up and take turns at the same work."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

from dps_ray.checks.process import engine_environment
from dps_ray.checks.specs import EngineSpec
from dps_ray.config import DpsConfigError

START_TIMEOUT_S = 600.0
"""Several engines may compile their model at once."""
WORK_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


class EngineProcess:
    """One engine behind a pipe; between its turns it waits and uses no CPU.

    Raises
    ------
    DpsConfigError
        The engine refuses its configuration; the message is the engine's own.
    RuntimeError
        The process fails otherwise; the message ends with what it last printed.
    """

    def __init__(self, spec: EngineSpec, threads: int) -> None:
        self.label = spec.label
        self._log = tempfile.TemporaryFile("w+", prefix="dps-bench-")  # noqa: SIM115
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dps_ray.bench.engines.serve", str(theirs.fileno())],
            env=engine_environment(threads),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._send({"spec": spec.as_dict()})

    def wait_until_ready(self) -> None:
        """Wait for the model to be loaded."""
        self._receive(START_TIMEOUT_S)

    def work(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Do one piece of work of ``dps_ray.bench.engines.work`` and give its figures back."""
        self._send({"work": name, "arguments": arguments})
        return self._receive(WORK_TIMEOUT_S)

    def close(self) -> None:
        """End the process, at once if it does not end by itself."""
        self._connection.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._failure("has ended") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(timeout_s):
                raise self._failure(f"did not answer within {timeout_s:.0f} s")
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._failure("has ended") from error
        if "refused" in answer:
            raise DpsConfigError(answer["refused"])
        return answer

    def _failure(self, what: str) -> RuntimeError:
        self._log.seek(0)
        return RuntimeError(f"engine {self.label!r} {what}: {self._log.read()[-4000:]}")


@contextmanager
def engines(specs: Mapping[str, EngineSpec], threads: int) -> Iterator[dict[str, EngineProcess]]:
    """Start all engines at once and give them when they are ready."""
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(EngineProcess(spec, threads)) for name, spec in specs.items()
        }
        for process in running.values():
            process.wait_until_ready()
        yield running


def in_turns(names: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Rounds in which everybody has one turn; the order turns from round to round."""
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            yield number, name


def all_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def connection_of(handle: str) -> Connection:
    """The child's end of the pipe, from its number on the command line."""
    return Connection(int(handle))
