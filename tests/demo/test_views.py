"""What the demo shows while it runs, and what it concludes."""

import io
import json
from pathlib import Path

import pytest

from dps_ray.bench.fleet_samples import growth, mode_spans, parse_status, precision_summary
from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.bench.slo import SloTarget
from dps_ray.demo.live import LiveView
from dps_ray.demo.outcome import describe, summarise_session, write_outcome
from dps_ray.demo.session import Session
from dps_ray.fleet.snapshot import Entry, FleetSnapshot, Standing
from dps_ray.modes import Mode

from .fleet_states import sample, state


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(text: str, height: int) -> list[str]:
    """What a terminal shows after printing lines, moving up and clearing lines."""
    lines, at = [""] * height, 0
    for piece in text.replace("\x1b[2K", "").split("\n"):
        while piece.startswith("\x1b["):
            up, piece = piece[2:].split("A", 1)
            at -= int(up)
        if at < height and piece:
            lines[at] = piece
        at += 1
    return lines


def test_table_is_redrawn_in_place_on_a_terminal() -> None:
    stream = Terminal()
    view = LiveView(stream, replicas=2)
    view.show(sample(0.0, state("a")), "0/5 answered, 0 failed")
    view.show(sample(0.5, state("a"), state("b", mode=Mode.FAST)), "1/5 answered, 0 failed")
    shown = screen(stream.getvalue(), height=4)
    assert "1/5 answered" in shown[0]
    assert shown[1].startswith("replica")
    assert "full" in shown[2]
    assert "fast" in shown[3]
    assert len({len(line) for line in shown[1:]}) == 1


def test_elsewhere_one_line_is_printed_every_few_seconds() -> None:
    stream = io.StringIO()
    view = LiveView(stream, replicas=1)
    for step in range(21):
        view.show(sample(step * 0.5, state()), "-")
    assert len(stream.getvalue().splitlines()) == 3
    assert "\x1b" not in stream.getvalue()


def test_unknown_figures_are_shown_as_unknown_not_as_zero() -> None:
    stream = Terminal()
    unknown = state(
        mode=None, used_blocks=None, headroom_blocks=None, restore_progress=None, running=None
    )
    LiveView(stream, replicas=1).show(sample(0.0, unknown), "-")
    assert screen(stream.getvalue(), height=3)[2].count("?") == 5


def test_restore_progress_is_marked_while_bytes_return() -> None:
    stream = io.StringIO()
    returning = state(mode=Mode.FAST, restoring=True, restore_progress=0.42)
    LiveView(stream, replicas=1).show(sample(0.0, returning), "-")
    assert "weights 42%^" in stream.getvalue()


def test_controllers_status_is_read_as_it_is_served() -> None:
    entries = (
        Entry(replica_id="a", standing=Standing.LIVE, age_s=0.1, state=state("a")),
        Entry.cold("b"),
    )
    served = FleetSnapshot(version=1, entries=entries).model_dump(mode="json")
    read = parse_status({"replicas": json.loads(json.dumps(served["entries"]))}, time_s=2.0)
    assert read == sample(2.0, state("a"))


def test_counters_grow_from_the_first_known_reading_of_each_replica() -> None:
    samples = [
        sample(0.0, state("a", tokens_full=100), state("b", tokens_full=None)),
        sample(1.0, state("a", tokens_full=130), state("b", tokens_full=7)),
        sample(2.0, state("b", tokens_full=9)),
    ]
    assert growth(samples, "tokens_full") == 32.0


def test_mode_spans_touch_and_cover_the_whole_track() -> None:
    modes = [Mode.FULL, Mode.FULL, Mode.FAST, Mode.FAST, Mode.FULL]
    samples = [sample(float(at), state(mode=mode)) for at, mode in enumerate(modes)]
    assert mode_spans(samples, "a") == [
        (0.0, 2.0, Mode.FULL),
        (2.0, 4.0, Mode.FAST),
        (4.0, 4.0, Mode.FULL),
    ]


def test_occupancy_over_time_is_kept_for_tuning() -> None:
    samples = [sample(0.5 * at, state(used_blocks=used)) for at, used in enumerate([4, 9, 30])]
    samples.insert(1, sample(0.2, state(used_blocks=None)))
    assert precision_summary(samples)["occupancy"] == {
        "period_s": 0.5,
        "base_blocks": 27,
        "total_blocks": 171,
        "used_blocks": [[4, 9, 30]],
    }
    assert precision_summary(samples[:1])["occupancy"] is None


def test_nothing_restored_gives_no_rate_and_no_token_gives_no_share() -> None:
    summary = precision_summary([sample(0.0, state(tokens_full=5, tokens_fast=1))])
    assert summary["share_full_precision"] is None
    assert summary["restore_gb_per_s"] is None


@pytest.fixture
def session() -> Session:
    counters = {"tokens_full": 0, "tokens_fast": 0, "switches_to_fast": 0, "switches_to_full": 0}
    counters |= {"restored_bytes": 0, "preemptions": 0}
    before = state(restore_busy_s=0.0, **counters)
    lent = state(mode=Mode.FAST, used_blocks=100, free_blocks=60)
    counters |= {"tokens_full": 30, "tokens_fast": 10, "switches_to_fast": 1}
    counters |= {"switches_to_full": 1, "restored_bytes": 10**8}
    after = state(restore_busy_s=0.5, last_restore_s=2.0, **counters)
    record = RequestRecord(
        0, 1.0, 1.0, 2, Outcome.OK, None, [1.5, 1.6], 1.6, prompt_tokens=4, output_tokens=2
    )
    samples = [sample(0.0, before), sample(1.0, lent), sample(2.0, after)]
    return Session([record], samples, missed_samples=0, t_base_ms=50.0)


def test_summary_and_picture_are_written(session: Session, tmp_path: Path) -> None:
    target = SloTarget(t_base_ms=session.t_base_ms)
    summary = summarise_session(session, target)
    figures, picture = write_outcome(tmp_path / "out", summary, session, target, "a title")
    assert json.loads(figures.read_text())["elastic"]["restore_gb_per_s"] == pytest.approx(0.2)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_conclusion_names_precision_switches_and_restore(session: Session) -> None:
    text = describe(summarise_session(session, SloTarget(t_base_ms=session.t_base_ms)))
    assert "75.0% of output tokens in full precision" in text
    assert "1 to fast, 1 to full" in text
    assert "100 MB copied in 0.50 s (0.20 GB/s)" in text
