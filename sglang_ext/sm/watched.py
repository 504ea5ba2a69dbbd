"""Runs the self-test in a child process and judges what it says, or that it says nothing."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from sglang_ext.guarded import run_guarded

COMMAND = (sys.executable, "-P", "-m", "sglang_ext.sm.self_test")
"""-P: no module of the working directory's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Seconds after which silence counts as a hang; a healthy test takes a fraction of each.

    ``start_s``: start of Python, torch and CUDA, from a cold disk at worst. ``level_s``: one level; ``probe_s``: one
    probe in it, or the GEMMs of one shape. ``total_s``: all. ``most_lost``: so many levels may fail and the way is
    still taken.
    """

    start_s: float = 60.0
    level_s: float = 15.0
    probe_s: float = 5.0
    total_s: float = 120.0
    most_lost: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What the self-test of one way found.

    ``levels`` passed, ascending; ``lost``: level → why it did not; ``reason`` says why the way is refused, and is
    empty if it is not. ``topology``: what smctrl's levels were planned on, in JSON. ``gemm``: ``checked``, or why not.
    """

    levels: tuple[int, ...] = ()
    lost: dict[int, str] = dataclasses.field(default_factory=dict)
    reason: str = ""
    topology: str = ""
    gemm: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.reason

    def to_dict(self) -> dict[str, Any]:
        """It in JSON's types; :meth:`from_dict` reads it back."""
        return {**dataclasses.asdict(self), "levels": list(self.levels), "lost": [*map(list, self.lost.items())]}

    @classmethod
    def from_dict(cls, read: dict[str, Any]) -> Report:
        """Raises KeyError, TypeError or ValueError for what :meth:`to_dict` has not written."""
        levels = tuple(int(level) for level in read["levels"])
        lost = {int(tpcs): str(why) for tpcs, why in read["lost"]}
        report = cls(**{**read, "levels": levels, "lost": lost})
        if not report.ok or not levels:
            raise ValueError("no passed test")
        return report


def run_self_test(
    kind: str, arguments: list[str], limits: Limits | None = None, command: Sequence[str] = COMMAND
) -> Report:
    """Test ``kind`` with ``arguments`` of :mod:`sglang_ext.sm.self_test`; never raises for what the test meets.

    A level that hangs or crashes the child is lost, and another child goes on with the rest. A level on the wrong SMs
    or with a wrong result refuses the whole way.
    """
    limits = limits or Limits()
    begin_s = time.monotonic()
    state = _State()
    while not state.reason:
        left_s = limits.total_s - (time.monotonic() - begin_s)
        if left_s <= 0:
            state.reason = f"the self-test did not end within {limits.total_s:g} s"
            break
        bounds = [f"--probe-timeout={limits.probe_s}", f"--limit={left_s:.0f}"]
        line = [*command, kind, *arguments, *state.resume(), *bounds]
        lost = len(state.lost)
        ended = run_guarded(line, state.take, first_s=limits.start_s, silence_s=limits.level_s, total_s=left_s)
        if not (state.ended or state.reason or len(state.lost) > lost):
            state.fail(f"it hung: {ended.detail}" if ended.how == "silent" else f"its process ended: {ended.detail}")
        if len(state.lost) > limits.most_lost:
            state.reason = "; ".join(f"with decode on {tpcs} TPCs: {why}" for tpcs, why in sorted(state.lost.items()))
        elif state.open is None and not state.remaining:
            break
    if not state.reason and not state.passed:
        state.reason = "; ".join(state.lost.values()) or "the self-test tested nothing"
    return Report(
        levels=tuple(sorted(state.passed)),
        lost=state.lost,
        reason=state.reason,
        topology=state.topology,
        gemm=state.gemm,
        seconds=round(time.monotonic() - begin_s, 3),
    )


@dataclasses.dataclass(slots=True)
class _State:
    planned: bool = False
    remaining: list[int] = dataclasses.field(default_factory=list)
    open: int | None = None
    ended: bool = False
    passed: list[int] = dataclasses.field(default_factory=list)
    lost: dict[int, str] = dataclasses.field(default_factory=dict)
    reason: str = ""
    topology: str = ""
    gemm: str = ""

    def resume(self) -> list[str]:
        """Further arguments for a child that goes on behind a casualty."""
        if not self.planned:
            return []
        more = [f"--levels={','.join(map(str, self.remaining))}"]
        return more + ([f"--topology={self.topology}"] if self.topology else [])

    def take(self, said: dict[str, Any]) -> None:
        event = said.get("event")
        self.ended = event == "end"
        if event == "plan":
            self.remaining = list(said["levels"])
            self.planned, self.gemm = True, said["gemm"]
            self.topology = said["topology"]
        elif event == "level":
            self.open = said["tpcs"]
        elif event == "done" and said["verdict"] == "ok":
            self.passed.append(said["tpcs"])
            self._close()
        elif event == "done" and said["verdict"] == "wrong":
            self.reason = said["reason"]
        elif event == "done":
            self.lose(said["reason"])
        elif event == "error":
            self.fail(said["reason"])

    def lose(self, why: str) -> None:
        assert self.open is not None
        self.lost[self.open] = why
        self._close()

    def fail(self, why: str) -> None:
        """The child is of no more use: a level's fault if one was open, else the whole way's."""
        if self.open is not None:
            self.lose(why)
        elif not self.reason:
            self.reason = why

    def _close(self) -> None:
        if self.open in self.remaining:
            self.remaining.remove(self.open)
        self.open = None
