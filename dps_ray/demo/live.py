"""Live view of the fleet: a table redrawn in place on a terminal, else a line now and then."""

from typing import TextIO

from dps_ray.bench.fleet_samples import FleetSample
from dps_ray.fleet.state import ReplicaState

LINE_PERIOD_S = 5.0
BAR_CELLS = 24
HEADER = f"{'replica':<9}{'mode':<6}{'KV in use':<{BAR_CELLS + 2}}{'blocks':>11}{'headroom':>10}"
HEADER += f"{'weights':>9}{'running':>9}{'waiting':>9}"


class LiveView:
    """Shows one sample after the other.

    Parameters
    ----------
    stream
        Where to write.
    replicas
        Number of replicas, for a table of constant height.
    """

    def __init__(self, stream: TextIO, replicas: int) -> None:
        self._stream = stream
        self._replicas = replicas
        self._redraws = stream.isatty()
        self._height = 0
        self._next_line_s = float("-inf")

    def show(self, sample: FleetSample, progress: str) -> None:
        """Show a sample; ``progress`` is one line about the requests."""
        if self._redraws:
            self._redraw(sample, progress)
        elif sample.time_s >= self._next_line_s:
            self._next_line_s = sample.time_s + LINE_PERIOD_S
            cells = "; ".join(
                f"{number}: {brief(state)}" for number, state in enumerate(ordered(sample), start=1)
            )
            print(f"{sample.time_s:6.1f} s  {progress}  |  {cells}", file=self._stream, flush=True)

    def _redraw(self, sample: FleetSample, progress: str) -> None:
        lines = [f"{sample.time_s:6.1f} s  {progress}", HEADER]
        lines += [row(number, state) for number, state in enumerate(ordered(sample), start=1)]
        lines += [""] * (self._replicas + 2 - len(lines))
        # Back to the table's first line, then clear and rewrite each one.
        start = f"\x1b[{self._height}A" if self._height else ""
        text = "".join(f"\x1b[2K{line}\n" for line in lines)
        print(start + text, end="", file=self._stream, flush=True)
        self._height = len(lines)


def ordered(sample: FleetSample) -> list[ReplicaState]:
    """States in a stable order."""
    return [sample.states[replica_id] for replica_id in sorted(sample.states)]


def row(number: int, state: ReplicaState) -> str:
    """One table row."""
    usage = state.kv_usage
    filled = 0 if usage is None else round(usage * BAR_CELLS)
    bar = "#" * filled + "." * (BAR_CELLS - filled)
    return (
        f"{number:<9}{state.mode or '?':<6}{bar:<{BAR_CELLS + 2}}{_blocks(state):>11}"
        f"{_text(state.headroom_blocks):>10}{_weights(state):>9}"
        f"{_text(state.running):>9}{_text(state.waiting):>9}"
    )


def brief(state: ReplicaState) -> str:
    """One replica in a few words."""
    return (
        f"{state.mode or '?'} {_blocks(state)} blocks, headroom {_text(state.headroom_blocks)}, "
        f"weights {_weights(state)}, {_text(state.running)}+{_text(state.waiting)} requests"
    )


def _blocks(state: ReplicaState) -> str:
    if state.used_blocks is None or state.free_blocks is None:
        return "?"
    return f"{state.used_blocks}/{state.used_blocks + state.free_blocks}"


def _weights(state: ReplicaState) -> str:
    """Share of residual bytes in place, with an arrow while more are coming back."""
    if state.restore_progress is None:
        return "?"
    return f"{state.restore_progress:.0%}{'^' if state.restoring else ''}"


def _text(value: int | None) -> str:
    return "?" if value is None else str(value)
