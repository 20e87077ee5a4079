"""A rank that has ended is noticed, whoever its parent is."""

import subprocess
import sys
import time

import psutil
from dps_deployments.rank_watch import RANK_TITLE, RankWatch

SLEEPS = "import time; time.sleep(60)"


def test_a_killed_rank_is_noticed_before_its_parent_asks_for_it() -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", SLEEPS]) for _ in range(2)]
    try:
        watch = RankWatch([psutil.Process(rank.pid) for rank in ranks])
        assert not watch.one_has_ended()
        ranks[1].kill()
        deadline_s = time.monotonic() + 60.0
        while not watch.one_has_ended():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        ranks[1].wait()
        assert watch.one_has_ended()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_only_ranks_among_the_children_are_watched() -> None:
    other = subprocess.Popen([sys.executable, "-c", SLEEPS])
    title = f"{RANK_TITLE}_TP1"
    rank = subprocess.Popen([sys.executable, "-c", SLEEPS, title])
    try:
        # A child bears its parent's command line until it has become another program.
        while title not in psutil.Process(rank.pid).cmdline():
            time.sleep(0.01)
        other.kill()
        watch = RankWatch.of_this_replica()
        other.wait()
        assert not watch.one_has_ended()
        rank.kill()
        rank.wait()
        assert watch.one_has_ended()
    finally:
        for process in (other, rank):
            process.kill()
            process.wait()


def test_a_replica_without_rank_processes_is_never_given_up() -> None:
    assert not RankWatch([]).one_has_ended()
