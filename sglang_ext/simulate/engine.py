"""The event loop: one server on simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from learner.latency import LatencyModel, Terms
from learner.traces import TraceRequest
from sglang_ext.host_time import WindowYield
from sglang_ext.policy.gaps import MORE_STEPS, first_tokens_s, lead_s
from sglang_ext.policy.types import IntArray, Situation
from sglang_ext.served import LoadResult, RequestResult
from sglang_ext.simulate.cache import Cache
from sglang_ext.simulate.host import HostTimes
from sglang_ext.simulate.systems import LOOK_AHEAD, Step, System

_H200_HOST = HostTimes()
_WAITING_SEEN = 64
# Decode steps between two decisions are timed together: at most so many numbers, and steps, at once.
MOST_CELLS, MOST_STEPS = 20_000, 64


@dataclass(slots=True)
class Live:
    """A request that was admitted or waits."""

    index: int
    request: TraceRequest
    seen_s: float
    cached: int = 0
    done: int = 0  # of its prompt, cached tokens among them
    left: int = 0  # tokens still to be made
    event_s: list[float] = field(default_factory=list)

    @property
    def needs(self) -> int:
        """KV slots from its admission to its end."""
        return self.request.input_tokens + self.request.output_tokens

    @property
    def new(self) -> int:
        return self.request.input_tokens - self.done

    def make(self, ends_s: list[float]) -> None:
        """Take a token at each of these times, as long as it wants any."""
        made = ends_s[: self.left]
        self.event_s += made
        self.left -= len(made)

    def result(self, deliver_s: float) -> RequestResult:
        """What its client saw, each token so long after it was made."""
        event_s = [at_s + deliver_s for at_s in self.event_s]
        return RequestResult(
            index=self.index,
            scheduled_s=self.request.arrival_s,
            sent_s=self.request.arrival_s,
            end_s=event_s[-1],
            input_tokens=self.request.input_tokens,
            requested_tokens=len(event_s),
            event_s=event_s,
            event_tokens=list(range(1, len(event_s) + 1)),
        )


def contexts_of(lives: Sequence[Live]) -> IntArray:
    """How many tokens of each are in the KV cache."""
    return np.array([live.done + len(live.event_s) for live in lives], dtype=np.int64)


def give_tokens(lives: Sequence[Live], ends_s: list[float]) -> None:
    """One token for each at each of these times, as long as it wants any."""
    for live in lives:
        live.make(ends_s)


class Engine:
    """Serves a trace with ``system``; forwards take what ``device`` predicts on average.

    As in SGLang with its overlap scheduler, the next batch is decided while one runs, so a request that arrives
    meanwhile is in the batch after it; a window is closed first. Requests that fail do not occur: every one gets all
    its tokens.
    """

    def __init__(
        self,
        system: System,
        device: LatencyModel,
        *,
        tbt_slo_s: float,
        host: HostTimes = _H200_HOST,
        kv_tokens: int | None = None,
        most_running: int = 256,
    ) -> None:
        self._system, self._device, self._host, self._tbt_slo_s = system, device, host, tbt_slo_s
        self._tpcs = device.total_tpcs
        self._cache, self._most_running = Cache(kv_tokens), most_running
        self._arriving: deque[Live] = deque()
        self._waiting: list[Live] = []
        self._chunked: Live | None = None
        self._running: list[Live] = []
        self._clock_s = self._decided_s = self._waited_s = 0.0
        self._after_window = False
        self._window_yield = WindowYield()
        self.shares: list[tuple[float, float, float]] = []
        """When iterations that ran both phases began, how long they lasted, and decode's share of the TPCs."""

    def run(self, trace: Sequence[TraceRequest], ended: Callable[[], None] = lambda: None) -> LoadResult:
        """Serve the whole trace; ``ended`` is called for every request that ends.

        Raises ValueError for a request that fits into no KV pool of that size.
        """
        lives = [Live(index, request, request.arrival_s + self._host.ingest_s) for index, request in enumerate(trace)]
        for live in lives:
            if live.needs > self._cache.room:
                raise ValueError(f"request {live.index} needs {live.needs:,} KV slots, more than there are")
        self._arriving, self._ended = deque(lives), ended
        while self._arriving or self._waiting or self._running or self._chunked is not None:
            self._iterate()
        results = [live.result(self._host.deliver_s) for live in lives]
        return LoadResult(results, max((result.end_s for result in results), default=0.0))

    def _iterate(self) -> None:
        while self._arriving and self._arriving[0].seen_s <= self._decided_s:
            self._waiting.append(self._arriving.popleft())
        offered = self._offered()
        if offered:
            self._share(offered)
        elif self._running:
            self._decode()
        else:
            # Nothing runs: the next arrival is served when it is seen.
            next_s = self._arriving[0].seen_s
            self._clock_s = self._decided_s = max(self._clock_s, next_s)
            self._after_window, self._waited_s = False, 0.0

    # ---- what could run

    def _offered(self) -> list[Live]:
        """Waiting requests that may be admitted now, a chunk in progress first, in order."""
        waiting = self._waiting
        if len(waiting) > 1:
            arrival_s = np.array([live.request.arrival_s for live in waiting])
            for live in waiting[:_WAITING_SEEN]:
                live.cached = self._cache.cached_tokens(live.request)
            cached = np.array([live.cached for live in waiting], dtype=np.int64)
            new = np.array([live.request.input_tokens for live in waiting], dtype=np.int64) - cached
            order = self._system.order(self._clock_s, arrival_s, np.maximum(new, 1), cached)
            self._waiting = waiting = [waiting[at] for at in order.tolist()]
        offered = [] if self._chunked is None else [self._chunked]
        rows, slots = self._most_running - len(self._running) - len(offered), self._cache.room
        for live in waiting[: max(min(rows, _WAITING_SEEN), 0)]:
            slots -= live.needs
            if slots < 0:
                break
            offered.append(live)
        return offered

    def _situation(self, offered: list[Live]) -> Situation:
        for live in offered:
            if live is not self._chunked:
                live.cached = live.done = self._cache.cached_tokens(live.request)
        host = self._host
        steps = min((live.left for live in self._running), default=0)
        return Situation(
            decode_context=contexts_of(self._running),
            prefill_new=np.array([live.new for live in offered], dtype=np.int64),
            prefill_cached=np.array([live.done for live in offered], dtype=np.int64),
            tbt_slo_s=self._tbt_slo_s,
            prefill_budget=self._system.chunk,
            max_look_ahead=min(steps, LOOK_AHEAD),
            host_overhead_s=host.after_window_s if self._after_window else host.batch_s,
            waited_s=self._waited_s,
            drain_s=0.0 if self._after_window else host.drain_s,
            after_window_s=host.after_window_s,
            after_window=self._after_window,
            window_yield=self._window_yield.value,
        )

    # ---- what runs

    def _share(self, offered: list[Live]) -> None:
        """One iteration for which the system decides."""
        situation = self._situation(offered)
        step = self._system.step(situation)
        taken = self._admit(offered, step.prefill_tokens)
        if not taken:
            self._decode(most_steps=1)
            return
        begin_s = self._clock_s + situation.host_overhead_s
        contexts = situation.decode_context
        new = np.array([tokens for _, tokens in taken], dtype=np.int64)
        cached = np.array([live.done for live, _ in taken], dtype=np.int64)
        ends = sum(live.new == tokens for live, tokens in taken)
        if step.window:
            begin_s += situation.drain_s
            first_s, end_s = self._window(step, begin_s, contexts, new, cached, ends)
        else:
            self._window_yield.fade()
            decodes = len(contexts) if step.steps else 0
            q = np.concatenate([np.ones(decodes, dtype=np.int64), new])
            c = np.concatenate([contexts[:decodes], cached])
            first_s = end_s = begin_s + self._takes(q, c, decodes + ends)
            if decodes:
                give_tokens(self._running, [end_s])
            self._waited_s = 0.0 if step.steps or not len(contexts) else self._waited_s + end_s - begin_s
            self._decided_s = begin_s
        if len(contexts):
            self.shares.append((begin_s, end_s - begin_s, self._decode_share(step)))
        self._after_window, self._clock_s = step.window, end_s
        if step.window:
            self._decided_s = end_s
        self._prefilled(taken, first_s)
        self._let_go()

    def _window(
        self, step: Step, begin_s: float, contexts: IntArray, new: IntArray, cached: IntArray, ends: int
    ) -> tuple[float, float]:
        """When its first tokens go out, and when it closes."""
        device, decodes = self._device, len(contexts)
        decode = device.terms(np.ones(decodes), contexts, decodes, step.decode_tpcs)
        prefill = device.terms(new, cached, ends, step.prefill_tpcs)
        step_s, prefill_s = self._take_beside(decode, prefill)
        # One is launched shortly before the last one ends, as long as the prefill runs.
        most = min(2 * step.steps + MORE_STEPS, min(live.left for live in self._running), LOOK_AHEAD)
        steps = max(1, min(ceil((prefill_s + lead_s(step_s)) / step_s), most))
        ends_s = [begin_s + (at + 1) * step_s for at in range(steps)]
        end_s = max(begin_s + prefill_s, ends_s[-1])
        give_tokens(self._running, ends_s)
        first_s = end_s
        if ends == len(new) and not self._waiting:
            contexts, rows = np.append(contexts, new + cached), decodes + ends
            alone = device.predict(device.terms(np.ones(rows), contexts, rows, self._tpcs))
            next_s = self._host.after_window_s + float(alone.upper_s[0])
            first_s = first_tokens_s(begin_s + prefill_s, end_s, next_s, self._tbt_slo_s)
        self._waited_s = end_s - (min(ends_s[-1], first_s) if ends else ends_s[-1])
        if step.promised_tokens_per_s:
            tokens, taken_s = steps * decodes + int(new.sum()), end_s - self._clock_s + self._host.after_window_s
            self._window_yield.note(tokens / taken_s / step.promised_tokens_per_s)
        return first_s, end_s

    def _decode(self, most_steps: int = MOST_STEPS) -> None:
        """Decode alone until somebody ends or arrives."""
        contexts = contexts_of(self._running)
        rows = len(contexts)
        steps = max(1, min(most_steps, MOST_CELLS // rows, *(live.left for live in self._running)))
        c = contexts + np.arange(steps)[:, None]
        times_s = self._device.predict(self._device.terms(1, c, rows, self._tpcs)).mean_s
        first_s = self._host.after_window_s if self._after_window else self._host.batch_s
        begins_s = self._clock_s + first_s + np.concatenate([[0.0], np.cumsum(times_s[:-1] + self._host.batch_s)])
        ends_s = begins_s + times_s
        if self._arriving:
            # Decided while the step before runs: whoever has arrived by then is looked at.
            before_s = np.concatenate([[self._decided_s], begins_s[:-1]])
            steps = max(1, int(before_s.searchsorted(self._arriving[0].seen_s, "left")))
        give_tokens(self._running, ends_s[:steps].tolist())
        self._clock_s, self._decided_s = float(ends_s[steps - 1]), float(begins_s[steps - 1])
        self._after_window, self._waited_s = False, 0.0
        self._let_go()

    def _takes(self, q: IntArray, c: IntArray, logits_rows: int) -> float:
        """A forward on all TPCs."""
        device = self._device
        return float(device.predict(device.terms(q, c, logits_rows, self._tpcs)).mean_s[0])

    def _take_beside(self, decode: Terms, prefill: Terms) -> tuple[float, float]:
        """One decode step and a prefill beside each other."""
        predict = self._device.predict
        return float(predict(decode, prefill).mean_s[0]), float(predict(prefill, decode).mean_s[0])

    def _decode_share(self, step: Step) -> float:
        if not step.window:
            return 1.0 if step.steps else 0.0
        return min(step.decode_tpcs, self._tpcs - step.prefill_tpcs) / self._tpcs

    # ---- requests

    def _admit(self, offered: list[Live], budget: int) -> list[tuple[Live, int]]:
        """What of each the budget buys; those that are new to it are admitted."""
        taken: list[tuple[Live, int]] = []
        for live in offered:
            tokens = min(live.new, budget)
            if not tokens:
                break
            if live is not self._chunked:
                self._cache.hold(live.needs)
                live.left = max(live.request.output_tokens, 1)
                self._waiting.remove(live)
            taken.append((live, tokens))
            budget -= tokens
        return taken

    def _prefilled(self, taken: list[tuple[Live, int]], end_s: float) -> None:
        self._chunked = None
        for live, tokens in taken:
            live.done += tokens
            if live.new:
                self._chunked = live
            else:
                self._running.append(live)
                give_tokens([live], [end_s])

    def _let_go(self) -> None:
        """Requests that have all their tokens leave."""
        if all(live.left for live in self._running):
            return
        for live in self._running:
            if not live.left:
                self._cache.release(live.request, live.needs)
                self._ended()
        self._running = [live for live in self._running if live.left]
