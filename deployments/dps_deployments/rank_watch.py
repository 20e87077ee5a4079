"""Notices a tensor-parallel rank that has ended, before vLLM does.

vLLM tells an engine of a dead rank when a step fails, else only once it has ended the other ranks:
one that waits for the dead one in a collective is given nine seconds for that.
"""

from collections.abc import Iterable
from typing import Self

import psutil

RANK_TITLE = "VLLM::Worker"


class RankWatch:
    """Some processes, none of which ends before the engine does.

    Parameters
    ----------
    ranks
        Of one engine, alive.
    """

    def __init__(self, ranks: Iterable[psutil.Process]) -> None:
        self._ranks = tuple(ranks)

    @classmethod
    def of_this_replica(cls) -> Self:
        """The ranks that descend from this process: all on CPUs with several of them, none of those
        that Ray runs as actors."""
        return cls(filter(_is_rank, psutil.Process().children(recursive=True)))

    def one_has_ended(self) -> bool:
        """Whether the engine has lost a rank; costs some ten microseconds a rank."""
        return any(_has_ended(rank) for rank in self._ranks)


def _is_rank(process: psutil.Process) -> bool:
    try:
        return RANK_TITLE in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _has_ended(process: psutil.Process) -> bool:
    try:
        # Nobody may have asked for its exit status yet.
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
