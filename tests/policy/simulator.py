"""Serves requests by the policy's decisions on simulated time and keeps every gap between two tokens.

Forwards take anything from their predicted mean to their predicted bound, decode steps of one window all alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.policy.decide import decide
from sglang_ext.policy.explore import Explorer
from sglang_ext.policy.gaps import MORE_STEPS, first_tokens_s, lead_s
from sglang_ext.policy.types import Decision, Settings, Situation
from tests.policy import reference


@dataclass
class Request:
    arrival_s: float
    prompt: int
    output: int
    prefilled: int = 0
    made: int = 0
    last_s: float = 0.0

    @property
    def context(self) -> int:
        return self.prompt + self.made - 1

    @property
    def done(self) -> bool:
        return self.made >= self.output


@dataclass
class Gap:
    """One gap between two tokens. ``promised``: the plans of the iterations that it spans all keep τ."""

    seconds: float
    promised: bool


@dataclass
class Simulator:
    model: object
    settings: Settings
    tbt_slo_s: float
    prefill_budget: int
    page_size: int
    host_overhead_s: float
    draw: Callable[[], float]
    """in [0, 1]: where in [mean, bound] the next forward's time lies"""
    explorer: Explorer | None = None
    drain_s: float = 0.0
    after_window_s: float = 0.0
    after_window: bool = False
    host_period_s: float = 0.0
    clock_s: float = 0.0
    gaps: list[Gap] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def run(self, requests: list[Request], most_iterations: int = 2000) -> None:
        waiting, running = sorted(requests, key=lambda r: r.arrival_s), []
        kept = True
        while waiting or running:
            assert len(self.decisions) < most_iterations
            arrived = [r for r in waiting if r.arrival_s <= self.clock_s]
            if not arrived and not running:
                self.clock_s = waiting[0].arrival_s
                continue
            decision = decide(self.situation(running, arrived), self.settings, self.model, self.explorer)
            self.decisions.append(decision)
            keeps = bool(decision.candidates["feasible"][decision.index])
            started = self.execute(decision, running, arrived, keeps, kept)
            waiting = [r for r in waiting if r.prefilled < r.prompt]
            running = [r for r in running + started if not r.done]
            kept = keeps

    def situation(self, running: list[Request], waiting: list[Request]) -> Situation:
        return Situation(
            decode_context=np.array([r.context for r in running], dtype=np.int64),
            prefill_new=np.array([r.prompt - r.prefilled for r in waiting], dtype=np.int64),
            prefill_cached=np.array([r.prefilled for r in waiting], dtype=np.int64),
            tbt_slo_s=self.tbt_slo_s,
            prefill_budget=self.prefill_budget,
            max_look_ahead=8,
            page_size=self.page_size,
            host_overhead_s=self.after_window_s if self.after_window else self.host_overhead_s,
            drain_s=0.0 if self.after_window else self.drain_s,
            after_window_s=self.after_window_s,
            host_period_s=self.host_period_s,
            after_window=self.after_window,
            waited_s=max((self.clock_s - r.last_s for r in running), default=0.0),
        )

    def execute(self, d: Decision, running: list[Request], waiting: list[Request], keeps: bool, kept: bool):
        """Run one iteration and return the requests that began to decode in it."""
        remaining = [r.prompt - r.prefilled for r in waiting]
        taken = reference.admit(remaining, d.prefill_tokens, self.page_size)
        assert sum(taken) <= self.prefill_budget
        ended = [q == n for q, n in zip(taken, remaining, strict=True)]
        started = [r for r, e in zip(waiting, ended, strict=True) if e]
        decode = ([1] * len(running), [r.context for r in running], len(running), d.decode_tpcs)
        prefill = (taken, [r.prefilled for r in waiting], sum(ended), d.prefill_tpcs)
        begin_s = self.clock_s + self.draw() * (self.after_window_s if self.after_window else self.host_overhead_s)
        if d.mode in ("temporal", "chunked"):
            both = (decode[0] + prefill[0], decode[1] + prefill[1], decode[2] + prefill[2], d.decode_tpcs)
            steps_end = [begin_s + max(self.takes(both), self.draw() * self.host_period_s)] if both[0] else [begin_s]
            prefill_end = end_s = steps_end[0]
        else:
            concurrent, steps = self.settings.concurrent, d.look_ahead_steps
            begin_s += 0.0 if self.after_window else self.draw() * self.drain_s
            step_s = self.takes(decode, prefill if concurrent else None)
            prefill_s = self.takes(prefill, decode if concurrent else None)
            if concurrent:
                # While the prefill runs one step is launched shortly before the last one ends, as far as there is room.
                room = min(2 * steps + MORE_STEPS, self.settings.max_look_ahead, 8)
                steps = max(1, min(math.ceil((prefill_s + lead_s(step_s)) / step_s), room))
            steps_end = [begin_s + (j + 1) * step_s for j in range(steps)]
            prefill_end = prefill_s + (begin_s if concurrent else steps_end[-1])
            end_s = max(prefill_end, steps_end[-1])
        self.after_window = d.mode in ("spatial", "reserved")
        for request in running:
            for step, time_s in enumerate(steps_end):
                if not request.done:
                    self.token(request, time_s, keeps and (kept or step > 0))
        for request, q in zip(waiting, taken, strict=True):
            request.prefilled += q
        first_s = end_s
        if self.after_window and self.settings.concurrent and len(waiting) == len(started):
            contexts = [r.context + len(steps_end) for r in running] + [r.prompt for r in started]
            rows = len(contexts)
            alone = reference.forward(self.model, [1] * rows, contexts, rows, self.model.total_tpcs, None)
            first_s = first_tokens_s(prefill_end, end_s, self.after_window_s + alone[1], self.tbt_slo_s)
        for request in started:
            self.token(request, first_s, True)
        self.clock_s = end_s
        return started

    def takes(self, forward, beside=None) -> float:
        mean_s, upper_s = reference.forward(self.model, *forward, beside)
        return mean_s + self.draw() * (upper_s - mean_s)

    def token(self, request: Request, time_s: float, promised: bool) -> None:
        if request.made:
            self.gaps.append(Gap(time_s - request.last_s, promised))
        request.made += 1
        request.last_s = time_s
