"""Launching forwards in order without waiting for them, on devices that queue work and on those that do not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Launcher(Protocol):
    """Runs functions one after the other. The future of a launch is done when the host part of it is."""

    def launch(self, function: Callable[[], Any]) -> Future[Any]: ...


class QueueingDevice:
    """A GPU: calling a forward only enqueues its kernels, so a launch is a call."""

    def launch(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function())
        return future


class BlockingDevice:
    """A CPU: a forward returns when it is done, so launches run in order on one thread of their own.

    That gives a look-ahead window the order that it has on a GPU: every step is launched before the host reads the
    first token, and tokens are taken while later steps run. ``context`` is entered around each launch (inference mode
    is a property of the thread).
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context = context
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="conflux-launch")

    def launch(self, function: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(self._run, function)

    def _run(self, function: Callable[[], Any]) -> Any:
        with self._context():
            return function()


def make_launchers(device: str, context: Callable[[], AbstractContextManager[Any]]) -> tuple[Launcher, Launcher]:
    """(for decode steps, for a window's prefill).

    A GPU's decode steps are launched at once, but an eager prefill keeps the host busy for longer than a decode step
    takes: it is launched by a thread, so that tokens are taken meanwhile. On a CPU one thread runs both, in order.
    """
    behind = BlockingDevice(context)
    return (QueueingDevice(), behind) if device == "cuda" else (behind, behind)
