"""The loop's brain, free of SGLang: decide with what was learnt, time what ran, hand the timing to the learner.

One controller lives in each scheduler process. It is told what the scheduler sees (a :class:`Situation`), says what
to run (a :class:`Decision`), gets the spans of the forwards that ran, and turns them into one
:class:`learner.records.Iteration` for the learner, the record file and the metrics.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import msgspec

from learner.client import LearnerClient
from learner.latency import LatencyModel
from learner.record_file import RecordWriter
from learner.records import Header, Iteration
from sglang_ext.config import RANDOM, Config
from sglang_ext.host_time import HostTime, WindowYield
from sglang_ext.iteration import Running, record_of
from sglang_ext.learner_watch import LearnerWatch
from sglang_ext.metrics import Metrics
from sglang_ext.policy.behind import FarBehind
from sglang_ext.policy.decide import decide
from sglang_ext.policy.explore import Explorer
from sglang_ext.policy.types import MODES, Decision, Settings, Situation
from sglang_ext.recent import Recent
from sglang_ext.slo import Attainment
from sglang_ext.timing import Clock

if TYPE_CHECKING:
    from sglang_ext.sm.select import Chosen

logger = logging.getLogger(__name__)

_MAX_OPEN = 64
# A host that is late by so much lets most iterations pass unrecorded: each record takes a millisecond of its time.
_LATE_S, _RECORDED_LATE = 0.5e-3, 4
# Snapshots come with every few forwards; taking one in costs as much as deciding.
_HEAR_EVERY_S = 0.05


def _explorer(settings: Settings) -> Explorer | None:
    return Explorer(seed=0) if settings.explore and settings.mode == "auto" else None


class Controller:
    """Decides with ``model``. ``client`` and ``writer`` may be None: learning or recording is off.

    ``launches_ahead``: a batch is launched while the one before it runs, so time between them means a late host.
    """

    def __init__(
        self,
        config: Config,
        header: Header,
        model: LatencyModel,
        settings: Settings,
        clock: Clock,
        *,
        client: LearnerClient | None = None,
        writer: RecordWriter | None = None,
        metrics: Metrics | None = None,
        sm: Chosen | None = None,
        launches_ahead: bool = False,
    ) -> None:
        self.config = config
        self.header = header
        self.settings = settings
        self.clock = clock
        self.attainment = Attainment()
        self.host_time = HostTime(launches_ahead)
        self.window_yield = WindowYield()
        self.decisions: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._model = model
        self._client = client
        self._writer = writer
        self._metrics = metrics
        self._sm = sm
        self._explorer, self._far_behind = _explorer(settings), FarBehind()
        self._random = random.Random(0) if config.mode == RANDOM else None
        self._open: deque[Running] = deque()
        self._iterations = 0
        self._idle = True
        self._said: set[str] = set()
        self._watch = LearnerWatch(self._say, logger)
        self._housekeeping_s = self._heard_s = 0.0
        self._recent = Recent()
        if sm is not None and sm.fell_back:
            self.fallbacks["sm_control"] += 1  # its reason was logged when it was chosen
        if metrics is not None and sm is not None:
            metrics.sm_control(sm.control.kind, sm.fell_back)

    # ---- before an iteration

    @property
    def model(self) -> LatencyModel:
        return self._model

    def poll(self) -> None:
        """Take in what has arrived since the last iteration: a snapshot, times of forwards. Never waits."""
        begin_s = now_s = time.perf_counter()
        if self._client is not None and now_s - self._heard_s > _HEAR_EVERY_S:
            self._heard_s = now_s
            snapshot = self._client.poll()
            if snapshot is not None:
                self._model = self._model.with_snapshot(snapshot)
                self._watch.seen(snapshot)
        self.clock.poll()
        while self._open and self._open[0].known:
            self._finish(self._open.popleft())
        if now_s - self._housekeeping_s > 0.5:
            self._housekeeping_s = now_s
            self._publish()
        self._recent.took("poll", time.perf_counter() - begin_s)

    def planned(self, taken_s: float) -> None:
        """Take note of how long the host took to order the queue, look at it and decide."""
        self._recent.took("plan", taken_s)

    def decide(self, situation: Situation) -> Decision:
        begin_s = time.perf_counter()
        settings = self.settings
        if self._random is not None:
            settings = dataclasses.replace(settings, mode=self._random.choice(MODES))
        if settings.mode == "auto" and settings.concurrent and self._far_behind.skips(situation):
            settings = dataclasses.replace(settings, concurrent=False)
        try:
            decision = decide(situation, settings, self._model, self._explorer)
        except Exception:
            # Whatever a snapshot holds must not end serving; if the roofline fails too, the fault is elsewhere.
            logger.exception("conflux: no decision with model version %d; using the roofline", self._model.version)
            self.fell_back("decision_error")
            self._model = self._model.with_snapshot(None)
            decision = decide(situation, settings, self._model, None)
        if settings.concurrent:
            self._far_behind.note(decision)
        if self._random is not None and decision.look_ahead_steps > 1 and situation.max_look_ahead > 1:
            steps = self._random.choice((situation.max_look_ahead, self._random.randint(1, situation.max_look_ahead)))
            decision = dataclasses.replace(decision, look_ahead_steps=steps)
        taken_s = time.perf_counter() - begin_s
        self._recent.decided(taken_s)
        if self._metrics is not None:
            self._metrics.deciding_took(taken_s)
        return decision

    def idle(self) -> None:
        """The scheduler has nothing to run; the time until the next iteration is nobody's overhead."""
        self._idle = True
        self.poll()

    def change(self, config: Config) -> None:
        """Serve on with ``config``, which :meth:`sglang_ext.config.Config.changed` made of the one so far."""
        self.config = config
        self.settings = dataclasses.replace(self.settings, mode=config.mode)
        self._explorer = _explorer(self.settings)
        ways = "mode %s, TBT target %g ms, TTFT target %g ms"
        logger.info("conflux: from now on " + ways, config.mode, 1e3 * config.tbt_slo_s, 1e3 * config.ttft_slo_s)
        if config.two_halves and not self.settings.concurrent:
            logger.warning("conflux: prefill and decode do not run at once on this server, whatever the mode")

    def one_after_the_other(self) -> None:
        """The device runs no two halves at once any more."""
        steps = self.config.look_ahead(concurrent=False)
        self.settings = dataclasses.replace(self.settings, concurrent=False, max_look_ahead=steps)

    def fell_back(self, reason: str) -> None:
        """Count that something could not run as decided; say each reason once in the log."""
        self.fallbacks[reason] += 1
        if self._metrics is not None:
            self._metrics.fell_back(reason)
        self._say(reason, f"falling back ({reason}); counted as conflux:fallbacks_total{{reason={reason!r}}}")

    # ---- around an iteration

    def begin(
        self, decision: Decision | None, mode: str, reason: str, *, tbt_slo_s: float, running: int, waiting: int
    ) -> Running:
        iteration = Running(
            time_s=time.perf_counter(),
            model=self._model,
            decision=decision,
            mode=mode,
            reason=reason,
            tbt_slo_s=tbt_slo_s,
            running=running,
            waiting=waiting,
            after_idle=self._idle,
        )
        if decision is not None and mode in ("spatial", "reserved") and self.settings.mode != "duet":
            rate = decision.candidates.plan(decision.index).tokens_per_s
            iteration.expected_tokens_per_s = rate / self.window_yield.value
        self._idle = False
        return iteration

    def launched(self, iteration: Running) -> None:
        """Every forward of this iteration has been launched; :meth:`poll` finishes it once their times are known."""
        self.decisions[iteration.mode] += 1
        if self._metrics is not None:
            self._metrics.decided(iteration.mode, iteration.reason)
        if len(self._open) < _MAX_OPEN:
            self._open.append(iteration)

    def _finish(self, iteration: Running) -> None:
        self._iterations += 1
        first_s = min(span.start_s for half in iteration.halves for span in half.spans)
        last_s = max(span.end_s for half in iteration.halves for span in half.spans)
        overhead_s = self.host_time.note(
            first_s,
            last_s,
            window=len(iteration.halves) > 1,
            mixed=iteration.halves[0].phase == "mixed",
            after_idle=iteration.after_idle,
        )
        if iteration.expected_tokens_per_s:
            taken_s = last_s - first_s + overhead_s + self.host_time.after_window.mean_s
            self.window_yield.note(iteration.tokens / taken_s / iteration.expected_tokens_per_s)
        else:
            self.window_yield.fade()
        for half in iteration.halves:
            for span in half.spans:
                self._recent.launched(half.phase, span.launch_s)
        late = (
            self.host_time.launches_ahead
            and overhead_s > _LATE_S
            and len(iteration.halves) == 1
            and self._writer is None
        )
        if late and self._iterations % _RECORDED_LATE:
            return
        # Positions of GPU events on the host's clock are sums, so the first may come out a little early.
        iteration.time_s = min(iteration.time_s, first_s)
        record = record_of(iteration, self._iterations, overhead_s)
        if self._client is not None and iteration.learnable:
            self._client.send(record)
        if self._writer is not None:
            self._write(record, iteration.decision)
        for stream in record.streams:
            for start, end, predicted in zip(stream.step_start_s, stream.step_end_s, stream.predicted_s, strict=True):
                measured_s = end - start
                if measured_s > 0:
                    self._recent.predicted(predicted, measured_s)
                    if self._metrics is not None:
                        self._metrics.forward(stream.phase, predicted, measured_s)

    def _write(self, record: Iteration, decision: Decision | None) -> None:
        candidates = decision.candidates.to_record() if decision is not None else None
        self._writer.write(msgspec.structs.replace(record, candidates=candidates))
        if self._writer.failed:
            self._writer = None
            self.fell_back("record")

    # ---- what others see

    def _publish(self) -> None:
        if self._writer is not None:
            self._writer.flush_soon()
        if self._client is not None:
            self._watch.heard(self._client.stats)
        if self._metrics is None:
            return
        self._metrics.attained(self.attainment)
        if self._client is not None:
            stats = self._client.stats
            self._metrics.learner(
                version=self._model.version,
                age_s=math.inf if stats.last_heartbeat_age_s is None else stats.last_heartbeat_age_s,
                restarts=stats.restarts,
                dropped=stats.dropped,
                rejected=stats.rejected,
                drifting=self._watch.drifting,
            )

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("conflux: %s", message)

    def state(self) -> dict[str, Any]:
        """Live state for ``/server_info``: plain values only."""
        attained = self.attainment
        state: dict[str, Any] = {
            "mode": self.config.mode,
            "tbt_slo_ms": self.config.tbt_slo_s * 1e3,
            "ttft_slo_ms": self.config.ttft_slo_s * 1e3,
            "device": self.header.device.name,
            "concurrent": self.settings.concurrent,
            "sm_control": self._sm.state() if self._sm is not None else None,
            "iterations": self._iterations,
            "decisions": dict(self.decisions),
            "fallbacks": dict(self.fallbacks),
            **self.host_time.state(),
            "window_yield": round(self.window_yield.value, 3),
            "model_version": self._model.version,
            **self._recent.state(),
            "ttft_slo_met": attained.ttft_met,
            "ttft_slo_missed": attained.ttft_missed,
            "tbt_slo_met": attained.tbt_met,
            "tbt_slo_missed": attained.tbt_missed,
            "learner": None,
        }
        if self._client is not None:
            stats = self._client.stats
            state["learner"] = {
                "sent": stats.sent,
                "dropped": stats.dropped,
                "rejected_snapshots": stats.rejected,
                "restarts": stats.restarts,
                "heartbeat_age_s": stats.last_heartbeat_age_s,
                "samples": stats.learner_samples,
                "drifting": list(self._watch.drifting),
            }
        return state

    def close(self) -> None:
        self.poll()
        if self._writer is not None:
            self._writer.close()
        if self._client is not None:
            self._client.close()
        if self._sm is not None:
            self._sm.control.close()
