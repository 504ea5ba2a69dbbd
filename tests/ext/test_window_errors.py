"""What becomes of concurrent windows that cannot be launched."""

from __future__ import annotations

import logging
import threading
import types

import pytest

windows = pytest.importorskip("sglang_ext.compat.windows")

from sglang_ext import timing  # noqa: E402
from sglang_ext.compat.scheduler import ConfluxScheduler  # noqa: E402
from sglang_ext.lanes import OneLane  # noqa: E402


def test_after_three_errors_no_window_is_concurrent(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[str] = []
    controller = types.SimpleNamespace(
        fell_back=counted.append, one_after_the_other=lambda: counted.append("one after the other")
    )
    lanes = object()
    one_rank = types.SimpleNamespace(tp_size=1)
    scheduler = types.SimpleNamespace(device="cpu", controller=controller, lanes=lanes, ps=one_rank)
    made = windows.Windows.__new__(windows.Windows)
    made._scheduler, made.errors = scheduler, 0
    with caplog.at_level(logging.ERROR):
        for number in range(1, 4):
            assert scheduler.lanes is lanes
            made._failed(RuntimeError(f"error {number}"))
    assert counted == ["window_error"] * 3 + ["one after the other"]
    assert isinstance(scheduler.lanes, OneLane)
    assert scheduler.lanes.state() == {"concurrent": False, "reason": "3 windows failed"}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "could not be launched" in said[0]
    assert "one after the other" in said[1]


def test_one_of_several_ranks_does_not_go_on_alone() -> None:
    made = windows.Windows.__new__(windows.Windows)
    made._scheduler = types.SimpleNamespace(ps=types.SimpleNamespace(tp_size=2))
    with pytest.raises(RuntimeError, match="out of luck"):
        made._failed(RuntimeError("out of luck"))


class Event:
    """A CUDA event as PyTorch's are: one that was never recorded counts as passed, but has no time."""

    clock_s = 0.0

    def __init__(self, enable_timing: bool = True) -> None:
        self.at_s: float | None = None

    def record(self) -> None:
        Event.clock_s += 0.001
        self.at_s = Event.clock_s

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        if self.at_s is None or other.at_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time")
        return 1e3 * (other.at_s - self.at_s)


def test_a_forward_counts_from_when_it_began_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = timing.EventClock()
    before, one = clock.start(), None
    clock.stop(before)
    one = clock.start()
    for _ in range(5):
        Event().record()  # the host prepares
    clock.begin(one)
    clock.stop(one)
    clock.poll()
    assert one.end_s - one.start_s == pytest.approx(0.001)
    assert one.start_s - before.end_s == pytest.approx(0.007)
    assert one.launch_s > 0.0


def test_a_replay_outside_of_a_forward_changes_no_times() -> None:
    scheduler, begun = object.__new__(ConfluxScheduler), []
    scheduler._span = threading.local()
    scheduler.controller = types.SimpleNamespace(clock=types.SimpleNamespace(begin=begun.append))
    scheduler._begins()
    scheduler._span.launching = None
    scheduler._begins()
    assert begun == []
    scheduler._span.launching = span = timing.Span()
    scheduler._begins()
    assert begun == [span]


def test_a_forward_that_failed_leaves_no_time_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = timing.EventClock()
    good, failed, later = clock.start(), clock.start(), None
    clock.stop(good)
    clock.drop(failed)
    later = clock.start()
    clock.stop(later)
    clock.poll()
    assert good.known
    assert later.known
    assert not failed.known
    assert later.end_s - later.start_s == pytest.approx(0.001)
