"""What can be hurt, and how its processes are found: by their titles, as ``ps`` shows them."""

import os
import random
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Fault(StrEnum):
    """A part of the fleet, killed without warning (SIGKILL); ``HANG`` only stops it (SIGSTOP)."""

    REPLICA = "replica"
    """A replica's server process: its engine is left behind without a parent."""
    ENGINE = "engine"
    """A replica's engine core, which holds the scheduler."""
    RANK = "rank"
    """One tensor-parallel rank of a replica, not its first."""
    HANG = "hang"
    """The same, stopped but not dead: the engine waits for it for ever."""
    CONTROLLER = "controller"
    """The fleet controller."""
    INGRESS = "ingress"
    """An ingress replica, with the requests that wait in its queue."""
    PROXY = "proxy"
    """Serve's HTTP proxy: clients' connections break. In HAProxy mode only the actor that manages
    HAProxy, not HAProxy itself."""

    @property
    def hits_rank(self) -> bool:
        return self in (Fault.RANK, Fault.HANG)

    @property
    def hits_connection(self) -> bool:
        """Whether clients' requests lie open in it, so that no other part can take them over."""
        return self in (Fault.INGRESS, Fault.PROXY)

    @property
    def hits_replica(self) -> bool:
        return self.hits_rank or self in (Fault.REPLICA, Fault.ENGINE)


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that was killed."""

    fault: Fault
    process: int
    at_s: float
    """Monotonic seconds."""


def titled(fault: Fault, title: str) -> bool:
    """Whether a process of this title is such a part."""
    match fault:
        case Fault.REPLICA:
            return title.startswith("ray::ServeReplica:") and "LLMServer" in title
        case Fault.ENGINE:
            return "EngineCore" in title
        case Fault.RANK | Fault.HANG:
            return "Worker_TP" in title and not title.rstrip().endswith("TP0")
        case Fault.CONTROLLER:
            return title.startswith("ray::ServeReplica:") and "FleetController" in title
        case Fault.INGRESS:
            return title.startswith("ray::ServeReplica:") and "DpsIngress" in title
        case Fault.PROXY:
            return title.startswith(("ray::ProxyActor", "ray::HAProxyManager"))


def find(fault: Fault, among: Collection[int]) -> list[int]:
    """Processes, out of some, that are such a part."""
    return sorted(process for process in among if titled(fault, title_of(process)))


def title_of(process: int) -> str:
    """Command line of a process as it shows itself; empty when there is none."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill_one(fault: Fault, processes: Callable[[], Collection[int]], rng: random.Random) -> Kill:
    """Kill one such part, drawn at random.

    Raises
    ------
    RuntimeError
        There is none.
    """
    found = find(fault, processes())
    if not found:
        raise RuntimeError(f"no process to kill: the fleet has no {fault.value}")
    process = rng.choice(found)
    os.kill(process, signal.SIGSTOP if fault is Fault.HANG else signal.SIGKILL)
    return Kill(fault, process, time.monotonic())
