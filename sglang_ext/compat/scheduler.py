"""conflux's scheduler: SGLang 0.5.17's with three steps of its loop overridden.

- *decide*: ``get_new_batch_prefill`` orders the queue, asks the controller, and lets stock build the prefill batch of
  the size that was decided; it then mixes the running batch in, or tags the prefill batch with its window.
- *drain*: ``is_disable_overlap_for_batch`` has stock process the previous iteration's result before a window.
- *execute*: ``run_batch`` runs the window's halves, or stock's forward, and times them.

The event loop and the result processor are stock's.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler

from sglang_ext.compat import batch as batches
from sglang_ext.compat import graphs, kv, setup
from sglang_ext.compat.messages import plain, unsound
from sglang_ext.compat.planner import Planner
from sglang_ext.compat.ranks import agree
from sglang_ext.compat.windows import Windows
from sglang_ext.config import ConfigError, raw_values
from sglang_ext.cpu.grammar import serve_grammars_on_cpu
from sglang_ext.iteration import Half, Running, foretold
from sglang_ext.policy.types import Decision, Situation
from sglang_ext.slo import Progress
from sglang_ext.timing import Span

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Plan:
    """What was decided for a prefill batch that waits to be run; ``running`` is set for a window."""

    decision: Decision
    situation: Situation
    mode: str
    reason: str
    running: ScheduleBatch | None = None


class ConfluxScheduler(Scheduler):
    """Takes SGLang's place in a scheduler process; for a server with another backend it is SGLang's own."""

    def __new__(cls, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(server_args, "_conflux", None) is None:
            return cls.__mro__[1](server_args, *args, **kwargs)
        if server_args._conflux["xp"] > 1:
            from sglang_ext.compat.xp_scheduler import XpScheduler

            return super().__new__(XpScheduler)
        return super().__new__(cls)

    def __init__(self, server_args: Any, port_args: Any, gpu_id: int, *args: Any, **kwargs: Any) -> None:
        if server_args.device == "cpu":
            serve_grammars_on_cpu()
        self.sm_control = setup.choose_sm_control(server_args, gpu_id)
        with setup.lanes_for(self.sm_control, server_args, gpu_id) as make_lanes:
            super().__init__(server_args, port_args, gpu_id, *args, **kwargs)
        self.lanes = make_lanes(self)
        self.controller = setup.make_controller(self)
        self.planner = Planner(self)
        self._span = threading.local()
        self._plan: Plan | None = None
        self._refused: str | None = None
        self._decode_owed = False
        self.waited_s, self.after_window = 0.0, False
        self.windows = Windows(self)
        self._time_forwards()
        if not self.batch_result_processor.enable_overlap:
            # Without it a request that finished in a window would be processed again at the window's next step.
            self.batch_result_processor = dataclasses.replace(self.batch_result_processor, enable_overlap=True)
        # What start-up made stays: a full collection in the midst of serving would look through all of it.
        gc.collect()
        gc.freeze()
        if os.environ.get("CONFLUX_TESTING"):
            faulthandler.register(signal.SIGUSR1, all_threads=True)

    def _time_forwards(self) -> None:
        original, clock = self.model_worker.forward_batch_generation, self.controller.clock

        def forward(*args: Any, **kwargs: Any) -> Any:
            span = self._span.last = self._span.launching = clock.start()
            try:
                result = original(*args, **kwargs)
            except BaseException:
                clock.drop(span)
                raise
            finally:
                self._span.launching = None
            clock.stop(span)
            return result

        self.model_worker.forward_batch_generation = forward
        # A graph's kernels start together, when the host has prepared what they read: only then does the device begin.
        graphs.listen(self._begins)

    def _begins(self) -> None:
        span = getattr(self._span, "launching", None)
        if span is not None:
            self.controller.clock.begin(span)

    # ---- requests come in

    def _add_request_to_queue(self, req: Req, *args: Any, **kwargs: Any) -> Any:
        self.note(req)
        self.refuse(req)
        return super()._add_request_to_queue(req, *args, **kwargs)

    def handle_generate_request(self, recv_req: Any) -> Any:
        self._refused = self.objection(recv_req)
        try:
            return super().handle_generate_request(plain(recv_req) if self._refused else recv_req)
        finally:
            self._refused = None

    def objection(self, request: Any) -> str | None:
        """Why a request cannot be served, or None."""
        return unsound(request, self.model_config.vocab_size)

    def refuse(self, req: Req) -> None:
        """Let the request that is being taken in end with an error, if there was an objection."""
        if self._refused:
            req.set_finish_with_abort(self._refused)

    def note(self, req: Req) -> None:
        """Remember a request's targets, and when it came if that is now; else it begins again with what it has made."""
        if hasattr(req, "conflux"):
            req.conflux.placed = -1
        else:
            config = self.controller.config
            req.conflux = Progress.of(
                req.sampling_params.custom_params,
                now_s=time.perf_counter(),
                ttft_slo_s=config.ttft_slo_s,
                tbt_slo_s=config.tbt_slo_s,
            )

    # ---- decide

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        self._plan = None
        self._take_ready_grammars()
        if self.chunked_req is None and (not self.waiting_queue or running_batch.batch_is_full):
            return super().get_new_batch_prefill(running_batch)
        if self._decode_owed and not running_batch.is_empty() and self._can_decode(running_batch):
            self._decode_owed = False
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        begin_s = time.perf_counter()
        self.planner.order_waiting()
        situation = self.planner.situation(running_batch)
        decision = agree(self, lambda: self.controller.decide(situation))
        self.controller.planned(time.perf_counter() - begin_s)
        if decision.prefill_tokens == 0:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        size = self.chunked_prefill_size
        self.chunked_prefill_size = max(decision.prefill_tokens, self.page_size)
        try:
            plan = super().get_new_batch_prefill(running_batch)
        finally:
            self.chunked_prefill_size = size
        if plan.batch_to_run is None:
            return plan
        self._plan = Plan(decision, situation, decision.mode, decision.reason)
        if plan.running_batch.is_empty():
            return plan
        if decision.mode in ("spatial", "reserved"):
            obstacle = batches.window_obstacle(plan.running_batch) or self._profiling()
            if obstacle is None:
                self._plan.running = plan.running_batch
                return plan
            self.fall_back(obstacle, self._plan)
            if decision.reason == "forced":
                # Mixing a prefill that was sized for a window would break the target that it was sized for.
                self._decode_owed = True
                return plan
        return self._mix(plan)

    def _mix(self, plan: NextBatchPlan) -> NextBatchPlan:
        new, running = plan.batch_to_run, plan.running_batch
        obstacle = batches.mix_obstacle(new, running)
        if obstacle is None:
            batches.shrink(running)
            if running.is_empty():
                return plan
            if kv.make_room(self, running.new_tokens_required_next_decode()):
                return NextBatchPlan(batch_to_run=new, running_batch=batches.mix(new, running))
            obstacle = "mix_memory"
        # Stock's own path: this prefill alone; the decodes come next.
        self.fall_back(obstacle, self._plan)
        self._decode_owed = True
        return plan

    def fall_back(self, reason: str, plan: Plan) -> None:
        self.controller.fell_back(reason)
        plan.mode, plan.reason = "temporal", f"fallback:{reason}"

    def _take_ready_grammars(self) -> None:
        """Stock does this while it builds a batch, which would be too late for the decision."""
        if self.grammar_manager.has_waiting_grammars():
            for req in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(req)

    def _profiling(self) -> str | None:
        # The profiler belongs to the thread that started it, and a window's steps may run on another.
        return "profiler" if self.profiler_manager.profile_in_progress else None

    def _can_decode(self, running: ScheduleBatch) -> bool:
        return kv.room(self) >= running.new_tokens_required_next_decode()

    # ---- drain

    def is_disable_overlap_for_batch(self, batch: Any, last_batch: Any) -> bool:
        if batch is not None and self._plan is not None and self._plan.running is not None and self.result_queue:
            return True
        return super().is_disable_overlap_for_batch(batch, last_batch)

    # ---- execute

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        plan, self._plan = self._plan, None
        if plan is not None and plan.running is not None:
            steps, spare = self.windows.room(plan)
            if steps:
                self.after_window = True
                return self.windows.run(batch, plan, steps, spare)
            self._decode_owed = not plan.running.is_empty()
        iteration = self.begin(plan, batch)
        phase, q, c, rows = batches.work_of(batch)
        if plan is not None and phase == "mixed":
            iteration.foretold = foretold(plan.decision, plan.situation, q, c, self.controller.settings.graph_tokens)
        result = super().run_batch(batch, *args, **kwargs)
        iteration.learnable = result.delay_sample_func is None
        iteration.halves.append(Half(phase, self.controller.model.total_tpcs, q, c, rows, [self._span.last]))
        self.controller.launched(iteration)
        self.controller.poll()
        self.waited_s, self.after_window = 0.0, False
        return result

    def run_stock(self, batch: ScheduleBatch) -> tuple[Any, Span]:
        """Stock's forward of a batch, on the streams that are the scheduler's now, and its times."""
        return super().run_batch(batch), self._span.last

    def begin(self, plan: Plan | None, batch: ScheduleBatch) -> Running:
        config = self.controller.config
        if plan is None:
            slo_s = min((req.conflux.tbt_slo_s for req in batch.reqs), default=config.tbt_slo_s)
            decodes = len(batch.reqs) if batch.forward_mode.is_decode() else 0
        else:
            slo_s, decodes = self.planner.tbt_slo_s, len(plan.situation.decode_context)
        return self.controller.begin(
            plan.decision if plan else None,
            plan.mode if plan else "temporal",
            plan.reason if plan else "idle",
            tbt_slo_s=slo_s,
            running=decodes,
            waiting=len(self.waiting_queue),
        )

    # ---- results go out

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        if self.windows.took(result):
            return
        super().process_batch_result(batch, result)
        now_s, attainment = time.perf_counter(), self.controller.attainment
        for req in batch.reqs:
            attainment.note(req.conflux, len(req.output_ids), now_s)

    def on_idle(self) -> None:
        super().on_idle()
        self.controller.idle()

    # ---- what others see

    def get_init_info(self) -> dict[str, Any]:
        return super().get_init_info() | {"conflux": {"mode": self.controller.config.mode}}

    def get_internal_state(self, recv_req: Any) -> Any:
        output = super().get_internal_state(recv_req)
        output.internal_state["conflux"] = self.controller.state() | {
            "windows": self.windows.stats.to_dict(),
            "pool": kv.pool_state(self),
            "lanes": self.lanes.state(),
        }
        return output

    def set_internal_state(self, recv_req: SetInternalStateReq) -> SetInternalStateReqOutput:
        """``/set_internal_state``: conflux's own entries are named as its options' fields, ``conflux_…``."""
        own = raw_values(recv_req.server_args)
        rest = {name: value for name, value in recv_req.server_args.items() if not name.startswith("conflux_")}
        try:
            config = self.controller.config.changed(own)
        except ConfigError as error:
            logger.warning("conflux: %s", error)
            return SetInternalStateReqOutput(updated=False)
        if rest:
            output = super().set_internal_state(SetInternalStateReq(server_args=rest))
            if not output.updated:
                return output
        if own:
            self.controller.change(config)
        return SetInternalStateReqOutput(updated=True)

    def release_host_resources(self) -> None:
        self.controller.close()
        super().release_host_resources()
