"""What becomes of concurrent windows that cannot be launched."""

from __future__ import annotations

import logging
import types

import pytest

windows = pytest.importorskip("sglang_ext.compat.windows")

from sglang_ext.lanes import OneLane  # noqa: E402


def test_after_three_errors_no_window_is_concurrent(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[str] = []
    controller = types.SimpleNamespace(
        fell_back=counted.append, one_after_the_other=lambda: counted.append("one after the other")
    )
    lanes = object()
    scheduler = types.SimpleNamespace(device="cpu", controller=controller, lanes=lanes)
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
    assert "run again alone" in said[0]
    assert "one after the other" in said[1]
