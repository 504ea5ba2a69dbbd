"""Forwards are launched in order, and without waiting where the device would make the host wait."""

from __future__ import annotations

import contextlib
import threading

import pytest

from sglang_ext.launch import BlockingDevice, QueueingDevice


def test_a_blocking_device_does_not_block_the_launcher():
    device, go, ran = BlockingDevice(contextlib.nullcontext), threading.Event(), []

    def forward(index: int) -> int:
        go.wait(10)
        ran.append(index)
        return index

    launched = [device.launch(lambda index=index: forward(index)) for index in range(8)]
    assert ran == []
    go.set()
    assert [future.result(10) for future in launched] == list(range(8))
    assert ran == list(range(8))


def test_each_launch_is_inside_the_context_on_one_thread():
    entered, threads = [], set()

    @contextlib.contextmanager
    def context():
        entered.append(True)
        threads.add(threading.get_ident())
        yield

    device = BlockingDevice(context)
    for _ in range(3):
        device.launch(lambda: threads.add(threading.get_ident())).result(10)
    assert len(entered) == 3
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("device", [BlockingDevice(contextlib.nullcontext), QueueingDevice()])
def test_errors_reach_who_takes_the_result(device):
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.launch(fail).result(10)


def test_a_queueing_device_launches_at_once():
    assert QueueingDevice().launch(lambda: 5).result(0) == 5
