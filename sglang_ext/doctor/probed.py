"""What the probe reported before it ended, and what that says about the ways of SM control. The latter is pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_ext.doctor.facts import Verdict, Way
from sglang_ext.doctor.probe import Orders
from sglang_ext.guarded import Ended, run_guarded

_IMPORT_S = 180.0  # PyTorch from a cold disk
_TEST_S = 300.0  # the self-test of each way has limits of its own


@dataclass(slots=True)
class Probed:
    """The probe's lines: the last of each step, and one for each way of control."""

    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: Ended = field(default_factory=lambda: Ended("done"))

    def take(self, line: dict[str, Any]) -> None:
        step = line.get("step")
        if step == "way":
            self.ways[str(line["kind"])] = line
        else:
            self.steps[str(step)] = line

    def error(self, step: str) -> str | None:
        """What a step said went wrong; how the probe ended, if that was before the step; None if all is well."""
        if step in self.steps:
            said = self.steps[step].get("error")
            return None if said is None else str(said)
        return self.unfinished

    @property
    def gpu(self) -> dict[str, Any]:
        """The step of the GPU in question, empty if it was not opened."""
        return self.steps.get("gpu", {})

    @property
    def unfinished(self) -> str | None:
        """How the probe ended before it had done all that it was to do; None if it did."""
        if self.ended.how == "done":
            return None
        after = next(reversed(self.steps), "its start")
        return f"the probe {'hung' if self.ended.how == 'silent' else 'crashed'} after {after}: {self.ended.detail}"


def probe_torch(environment: Mapping[str, str] | None = None) -> Probed:
    """Import PyTorch in a child and ask what it sees. ``environment``: the child's, if not this process's."""
    return _probe(["torch"], _IMPORT_S, environment)


def probe_driver(orders: Orders) -> Probed:
    """Open the driver in a child and do what is ordered there."""
    return _probe(["driver", orders.encode()], _TEST_S, None)


def _probe(arguments: list[str], total_s: float, environment: Mapping[str, str] | None) -> Probed:
    probed = Probed()
    command = [sys.executable, "-P", "-m", "sglang_ext.doctor.probe", *arguments]
    probed.ended = run_guarded(
        command, probed.take, first_s=_IMPORT_S, silence_s=total_s, total_s=total_s, environment=environment
    )
    return probed


def ways_of(probed: Probed | None, problem: str | None, known: str) -> tuple[Way, Way]:
    """Verdict on each way of SM control.

    ``probed``: what the driver part reported; None if it was not run, for the reason ``problem``, which otherwise says
    why there is nothing to test. ``known``: what is known of the place of a stream's mask without a test.
    """
    return _way("smctrl", probed, problem, known), _way("green", probed, problem, "nothing was run on the GPU")


def _way(kind: Literal["smctrl", "green"], probed: Probed | None, problem: str | None, untested: str) -> Way:
    obstacle = problem or (probed.error("driver") if probed else "it was not looked for")
    if probed is None or obstacle is not None:
        return Way(kind=kind, verdict="unavailable", reason=obstacle or "")
    if not probed.steps["driver"].get("gpus"):
        return Way(kind=kind, verdict="unavailable", reason="the driver sees no GPU")
    if kind in probed.ways:
        told = probed.ways[kind]
        verdict: Verdict = "passed" if told["passed"] else "failed"
        return Way(kind=kind, verdict=verdict, reason=str(told["reason"]), levels=tuple(told["levels"]))
    broken = probed.gpu.get("error") or probed.unfinished
    if broken is not None:
        return Way(kind=kind, verdict="failed", reason=str(broken))
    return Way(kind=kind, verdict="not tested", reason=untested)
