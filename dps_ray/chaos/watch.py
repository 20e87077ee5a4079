"""What the fleet says about itself while it is hurt, and what its engines really do."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from dps_ray.config import DpsConfigError
from dps_ray.engine.page_owner import keys_owned_by
from dps_ray.engine.status_page import StatusPage
from dps_ray.modes import Mode

LOOK_PERIOD_S = 0.1
PAGES_PERIOD_S = 0.01
PAGES_REFRESH_S = 1.0
GONE = ("dead", "draining")


@dataclass(frozen=True, slots=True)
class Sight:
    """One answer of the controller."""

    at_s: float
    """Monotonic seconds when it arrived."""
    serving: frozenset[str]
    """Replicas that are live, and that some router offers requests to."""
    routable: frozenset[str]
    """Replicas that some router might send a request to: offered, and not known to be gone."""
    listening: int
    """Routers that listen to the controller."""
    gone_at_s: Mapping[str, float]
    """Monotonic seconds when the controller heard that a replica is gone, by replica. The answer
    may come seconds later on a machine whose every processor is busy."""


def sight_of(status: Mapping[str, Any], at_s: float, clocks_apart_s: float) -> Sight:
    """Read the controller's ``GET /dps/status`` answer.

    Parameters
    ----------
    status
        The answer.
    at_s
        Monotonic seconds when it came.
    clocks_apart_s
        Wall clock less monotonic clock, of this host and so of the controller's.
    """
    made_at_s = status["time_s"] - clocks_apart_s
    standings = {entry["replica_id"]: entry["standing"] for entry in status["replicas"]}
    offered = {name for router in status["routers"] for name in router["offered"]}
    return Sight(
        at_s=at_s,
        serving=frozenset(name for name in offered if standings.get(name) == "live"),
        routable=frozenset(name for name in offered if standings.get(name) not in GONE),
        listening=status["listening_routers"],
        gone_at_s={
            entry["replica_id"]: made_at_s - entry["changed_ago_s"]
            for entry in status["replicas"]
            if entry["standing"] in GONE
        },
    )


@dataclass
class Restores:
    """What the engines' own status pages showed, whether or not a controller was alive."""

    most_at_once: int = 0
    """Engines seen with a restore under way at one moment."""
    most_permitted: int = 0
    """Engines that had lent memory and a valid permit to restore at one moment."""
    most_fast: int = 0
    """Engines in fast mode at one moment."""
    returns: int = 0
    """Returns to full mode, of all engines."""


class Watch:
    """Looks at the controller and at the engines' pages in the background.

    Parameters
    ----------
    url
        The fleet.
    processes
        All processes of the fleet.
    """

    def __init__(self, url: str, processes: Callable[[], Collection[int]]) -> None:
        self.sight: Sight | None = None
        """The latest answer; ``None`` while the controller does not answer."""
        self.restores = Restores()
        self._url = url
        self._processes = processes
        self._pages: dict[str, StatusPage] = {}
        self._returns: dict[str, int] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look within the block."""
        stop = threading.Event()
        # A page whose writer was killed amid a publication holds its reader up for a second.
        pages = asyncio.create_task(asyncio.to_thread(self._read_pages, stop))
        looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            stop.set()
            looking.cancel()
            for result in await asyncio.gather(looking, pages, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    async def _look(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=2.0, trust_env=False) as http:
            while True:
                try:
                    response = await http.get("/dps/status")
                    answered = response.status_code == httpx.codes.OK
                    now_s = time.monotonic()
                    apart_s = time.time() - now_s
                    self.sight = sight_of(response.json(), now_s, apart_s) if answered else None
                except httpx.TransportError:
                    self.sight = None
                await asyncio.sleep(LOOK_PERIOD_S)

    def _read_pages(self, stop: threading.Event) -> None:
        refreshed_s = 0.0
        while not stop.wait(PAGES_PERIOD_S):
            if time.monotonic() - refreshed_s > PAGES_REFRESH_S:
                refreshed_s = time.monotonic()
                self._refresh_pages()
            self._count()

    def _count(self) -> None:
        """Read all pages twice. What both readings show of an engine held between the two, at one
        moment for all engines, however long this thread stood still between two pages."""
        first, second = self._read_all(), self._read_all()
        both = [first[key] & second[key] for key in first.keys() & second.keys()]
        restores = self.restores
        restores.most_at_once = max(restores.most_at_once, _how_many(both, "restoring"))
        restores.most_permitted = max(restores.most_permitted, _how_many(both, "permitted"))
        restores.most_fast = max(restores.most_fast, _how_many(both, "fast"))
        restores.returns = sum(self._returns.values())

    def _read_all(self) -> dict[str, set[str]]:
        """What holds of each engine."""
        seen = {}
        for key, page in self._pages.items():
            with contextlib.suppress(RuntimeError):
                status = page.read()
                if status is None:
                    continue
                self._returns[key] = status.switches_to_full
                lent = status.units_backed < status.units
                holds = {
                    "restoring": status.restoring,
                    "permitted": lent and page.permits().restore,
                    "fast": status.mode is Mode.FAST,
                }
                seen[key] = {name for name, held in holds.items() if held}
        return seen

    def _refresh_pages(self) -> None:
        keys = keys_owned_by(self._processes())
        for key in self._pages.keys() - keys:
            self._pages.pop(key).close()
        for key in keys - self._pages.keys():
            # It may end between the two looks.
            with contextlib.suppress(DpsConfigError):
                self._pages[key] = StatusPage.attach(key)


def _how_many(engines: Collection[set[str]], name: str) -> int:
    return sum(name in engine for engine in engines)
