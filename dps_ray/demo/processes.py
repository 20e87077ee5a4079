"""Child processes that never outlive this one.

Ray starts its daemons in sessions of their own, so process groups do not reach them. This process
adopts orphans instead (Linux ``PR_SET_CHILD_SUBREAPER``): whatever a child leaves behind becomes a
child of this process, and the whole tree can be seen and stopped.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends.

    Raises
    ------
    OSError
        The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


def descendants() -> set[int]:
    """Process ids of all living descendants of this process; zombies are reaped, not counted."""
    _reap()
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            status = _parent_and_state(entry)
            if status is not None and status[1] != "Z":
                children.setdefault(status[0], []).append(int(entry.name))
    found: set[int] = set()
    frontier = [os.getpid()]
    while frontier:
        for child in children.get(frontier.pop(), ()):
            found.add(child)
            frontier.append(child)
    return found


def stop_descendants(before: set[int], *, grace_s: float) -> set[int]:
    """Stop every descendant that is not in ``before``.

    Parameters
    ----------
    before
        Descendants that belong to somebody else and stay.
    grace_s
        Time to end by themselves after SIGTERM, seconds; then SIGKILL.

    Returns
    -------
    set of int
        Process ids that are still alive after all: empty unless the kernel cannot end one.
    """
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        deadline_s = time.monotonic() + patience_s
        signalled: set[int] = set()
        while left := descendants() - before:
            # Processes may still be starting others while they are being stopped.
            for process in left - signalled:
                _signal(process, number)
            signalled |= left
            if time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
        if not left:
            return set()
    return descendants() - before


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM in the block: an impatient second one must not end a clean-up."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _reap() -> None:
    """Collect ended adopted children, so that they leave the process table.

    Children of ``subprocess`` are collected too; it copes and reports their status as unknown.
    """
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process == 0:
            return


def _parent_and_state(entry: Path) -> tuple[int, str] | None:
    try:
        text = (entry / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the command in parentheses, may itself hold spaces and parentheses.
    state, parent = text[text.rindex(")") + 2 :].split()[:2]
    return int(parent), state


def _signal(process: int, number: signal.Signals) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return
