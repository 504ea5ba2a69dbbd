"""Runs windows: decode steps and a prefill, each on its lane, tokens taken one step at a time."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from sglang.srt.utils.common import DynamicGradMode

from sglang_ext.compat import batch as batches
from sglang_ext.compat import kv
from sglang_ext.compat.ranks import agree
from sglang_ext.host_time import Varying
from sglang_ext.iteration import Half
from sglang_ext.lanes import OneLane
from sglang_ext.launch import make_launchers
from sglang_ext.policy.gaps import MORE_STEPS, first_tokens_s, lead_s
from sglang_ext.window import Pace, Window, WindowStats

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.compat.scheduler import ConfluxScheduler, Plan
    from sglang_ext.policy.types import Decision
    from sglang_ext.timing import Span

logger = logging.getLogger(__name__)

_MOST_ERRORS = 3
# How often a window looks whether something has ended.
_LOOK_EVERY_S = 3e-4
Next = Literal["tokens", "first tokens", "step", "end"]


class Windows:
    """The windows of one scheduler, one at a time; each opens and closes inside one ``run_batch``."""

    def __init__(self, scheduler: ConfluxScheduler) -> None:
        self._scheduler = scheduler
        self._launcher, self._prefill_launcher = make_launchers(scheduler.device, self._launch_context)
        self.stats = WindowStats()
        self.errors = 0
        # Of the last windows: how long launching a prefill keeps the host, and a decode step the device.
        self._launch, self._step_s = Varying(0.03), 0.0
        self._launching_runs = scheduler.device != "cuda"
        self._holding: Any = None  # what the last prefill reads, which may still run when its window has closed
        self._taken: Any = None  # result of a prefill whose tokens went out before its window closed

    @property
    def eager_launch_s(self) -> float:
        """How long launching a prefill that is no graph keeps the host busy beside the device; 0 on a CPU."""
        return 0.0 if self._launching_runs else self._launch.mean_s

    def took(self, result: Any) -> bool:
        """Whether this is the result of a prefill whose tokens went out before its window closed."""
        if self._taken is None or self._taken is not result:
            return False
        self._taken = None
        return True

    def room(self, plan: Plan) -> tuple[int, int]:
        """(steps, spare ones) that fit now that the prefill has its slots; no step sends the prefill alone, counted."""
        scheduler, running = self._scheduler, plan.running
        batches.shrink(running)
        if running.is_empty():
            plan.mode, plan.reason = "temporal", "idle"
            return 0, 0
        wanted, most = plan.decision.look_ahead_steps, scheduler.planner.most_steps(running)
        steps = min(wanted, most)
        # Where a prefill outlasts its prediction, decode goes on beside it.
        spare = min(most - steps, steps + MORE_STEPS) if scheduler.lanes.may_outlast else 0
        lengths, page = running.seq_lens_cpu, scheduler.page_size
        while steps and not kv.make_room(scheduler, kv.look_ahead_slots(lengths, steps + spare, page)):
            steps, spare = (steps, 0) if spare else (0, 0)
        if not steps:
            scheduler.fall_back("window_memory", plan)
        elif steps < wanted:
            scheduler.controller.fell_back("window_shrunk")
        return steps, spare

    def run(self, batch: ScheduleBatch, plan: Plan, steps: int, spare: int) -> Any:
        """Both halves; returns the prefill's result, as stock's ``run_batch`` does, with the steps all taken."""
        scheduler, running, decision = self._scheduler, plan.running, plan.decision
        lanes, controller = scheduler.lanes, scheduler.controller
        iteration = scheduler.begin(plan, running)
        iteration.concurrent = lanes.concurrent
        decode = Half("decode", decision.decode_tpcs, [1] * len(running.reqs), running.seq_lens_cpu.tolist(),
                      len(running.reqs), [])  # fmt: skip
        phase, q, c, rows = batches.work_of(batch)
        prefill = Half(phase, decision.prefill_tpcs, q, c, rows, [])
        locations = kv.allocate_ahead(scheduler, running, steps + spare)
        window = Window(
            scheduler,
            running,
            locations,
            lambda step: self._launcher.launch(lambda: self._decode(step, decision.decode_tpcs)),
        )
        with lanes.window(decision.decode_tpcs):
            launched = self._both(window, batch, running, decision, steps, spare)
        error = window.error or launched.exception()
        if error is not None:
            self._failed(error)
        if launched.exception() is None:
            result, span, launch_s, self._holding = launched.result()
            self._launch.note(launch_s)
        else:
            # The steps' tokens are out and stay; the prefill is run again, as an iteration of its own.
            iteration.concurrent, prefill.tpcs = False, controller.model.total_tpcs
            result, span = scheduler.run_stock(batch)
        window.close()
        self.stats.add(window)
        batches.shrink(running)
        # A decode graph leaves its read-done event behind; the prefill must be fenced as a whole.
        scheduler.model_worker.war_fastpath_runner.war_fastpath_read_done_event = None
        decode.spans, prefill.spans = window.spans, [span]
        iteration.halves += [decode, prefill] if decode.spans else [prefill]
        controller.clock.poll()
        left_s = decision.left_s
        if decode.spans and iteration.known:
            left_s, last = span.end_s - decode.spans[-1].end_s, decode.spans[-1]
            self._step_s = last.end_s - last.start_s
        # So long have some been without a token: decodes, or those that got their first one before the window closed.
        since_s = time.perf_counter() - window.first_tokens_at_s if window.first_tokens_at_s is not None else 0.0
        scheduler.waited_s = max(left_s, since_s, 0.0)
        controller.launched(iteration)
        return result

    def _failed(self, error: BaseException) -> None:
        """One half could not be launched. Serving goes on; after a few such errors without concurrent windows."""
        scheduler = self._scheduler
        if scheduler.ps.tp_size > 1:
            raise error  # the other ranks wait in collectives that nobody would join
        self.errors += 1
        if self.errors == 1:
            logger.error("conflux: a window's forward could not be launched; serving goes on", exc_info=error)
        scheduler.controller.fell_back("window_error")
        if scheduler.device == "cuda":
            torch.cuda.synchronize()
            # The frames of what failed hold its tensors.
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()
        if self.errors == _MOST_ERRORS:
            logger.error("conflux: after %d such errors prefill and decode run one after the other", self.errors)
            scheduler.lanes = OneLane(f"{self.errors} windows failed")
            scheduler.controller.one_after_the_other()

    def _both(
        self,
        window: Window,
        batch: ScheduleBatch,
        running: ScheduleBatch,
        decision: Decision,
        steps: int,
        spare: int,
    ) -> Future[Any]:
        """Launch both halves and take all steps; the future, which is done, is of :meth:`_prefill`."""
        scheduler, lanes = self._scheduler, self._scheduler.lanes
        if lanes.concurrent and not lanes.serial:
            # While the host launches the prefill it launches no steps: those that last until then, which may be more
            # than the plan has, and the rest later.
            steps = min(steps + spare, agree(scheduler, lambda: self._cover(decision)))
        window.launch(steps)
        while lanes.serial and window.pending:
            window.accept_next()
        launched = self._prefill_launcher.launch(lambda: self._prefill(batch, decision.prefill_tpcs))
        # The iterations before are finished while the device has something to do, not between two windows.
        scheduler.controller.poll()
        if lanes.may_outlast and not lanes.serial:
            self._roll(window, batch, launched, Pace(self._expected_step_s(decision)), self._patience_s(batch, running))
        while window.pending:
            window.accept_next()
        wait([launched])
        return launched

    def _roll(self, window: Window, batch: ScheduleBatch, launched: Future[Any], pace: Pace, patience_s: float) -> None:
        """Take tokens as they come, and keep one step going as long as the prefill runs. All ranks do the same.

        First tokens may go out ``patience_s`` before the window's end.
        """
        while True:
            following = agree(self._scheduler, lambda: self._next(window, launched, pace, patience_s))
            if following == "end":
                return
            if following == "tokens":
                window.accept_next()
                pace.step_ended()
                continue
            wait([launched])
            if following == "step":
                window.launch(1)
                continue
            window.prefill_taken = True
            if patience_s < math.inf:
                window.first_tokens_at_s = time.perf_counter()
            if launched.exception() is None:
                self._take(batch, launched.result()[0])

    def _next(self, window: Window, launched: Future[Any], pace: Pace, patience_s: float) -> Next:
        """Wait for what comes next: a step's tokens, the prefill's, the time to launch a step, or the window's end.

        Lanes are the scheduler's own streams in turn, so no step is launched while the prefill is.
        """
        lanes = self._scheduler.lanes
        while True:
            ended = launched.done() and not lanes.prefill_runs()
            if ended and not window.prefill_taken and pace.left_s(window.outstanding) <= patience_s:
                return "first tokens"
            if ended and not window.pending:
                return "end"
            if window.pending and window.has_ended:
                return "tokens"
            due = pace.left_s(window.outstanding) <= lead_s(pace.step_s)
            if launched.done() and not ended and window.can_grow and (due or not window.pending):
                return "step"
            time.sleep(_LOOK_EVERY_S)

    def _patience_s(self, batch: ScheduleBatch, running: ScheduleBatch) -> float:
        """How long before the window's end a prefill's first tokens may go out; see
        :func:`sglang_ext.policy.gaps.first_tokens_s`."""
        scheduler = self._scheduler
        controller, chunked = scheduler.controller, scheduler.chunked_req
        goes_on = [req for req in batch.reqs if req is not chunked and batches.remaining_tokens([req]) > 1]
        if not goes_on:
            return math.inf
        if chunked is not None or scheduler.waiting_queue:
            return 0.0
        model, rows = controller.model, len(running.reqs) + len(goes_on)
        context = [*running.seq_lens_cpu.tolist(), *(len(req.origin_input_ids) for req in goes_on)]
        alone = model.predict(model.terms([1] * rows, context, rows, model.total_tpcs))
        next_s = controller.host_time.overheads(after_window=True).after_window_s + float(alone.upper_s[0])
        return -first_tokens_s(-math.inf, 0.0, next_s, min(req.conflux.tbt_slo_s for req in goes_on))

    def _take(self, batch: ScheduleBatch, result: Any) -> None:
        """Hand out the prefill's first tokens although decode steps still run."""
        # A grammar's are sampled only behind the results of the iteration before.
        if result.delay_sample_func is None:
            self._scheduler.process_batch_result(batch.copy(), result)
            self._taken = result

    def _decode(self, step: ScheduleBatch, tpcs: int) -> tuple[Any, ScheduleBatch, Any, Span]:
        """One step: its result, what that will be processed with, what it holds on to, and its times."""
        with self._scheduler.lanes.decoding(tpcs):
            result, span = self._scheduler.run_stock(step)
        return result, step.copy(), self._held(), span

    def _prefill(self, batch: ScheduleBatch, tpcs: int) -> tuple[Any, Span, float, Any]:
        """Its result, its times, how long launching it took, and what it holds on to."""
        begin_s = time.perf_counter()
        with self._scheduler.lanes.prefilling(tpcs):
            result, span = self._scheduler.run_stock(batch)
        return result, span, time.perf_counter() - begin_s, self._held()

    def _held(self) -> Any:
        """Stock keeps the tensors of its last two forwards alive; a window has more of them in flight."""
        scheduler = self._scheduler
        return scheduler.batch_record_buf[scheduler.batch_record_ct] if scheduler.enable_overlap else None

    def _cover(self, decision: Decision) -> int:
        """Steps that last until a prefill has been launched."""
        step_s = self._expected_step_s(decision)
        return max(1, math.ceil((self._launch.upper_s + lead_s(step_s)) / step_s))

    def _expected_step_s(self, decision: Decision) -> float:
        planned_s = decision.predicted_s / decision.look_ahead_steps
        return max(min(planned_s, self._step_s or planned_s), 1e-3)

    @contextmanager
    def _launch_context(self) -> Iterator[None]:
        """What a thread that launches forwards lacks of the scheduler's own."""
        scheduler = self._scheduler
        with DynamicGradMode():
            if scheduler.device != "cuda":
                yield
                return
            torch.cuda.set_device(scheduler.ps.gpu_id)
            with torch.cuda.stream(scheduler.schedule_stream):
                yield
