"""conflux's scheduler on one of several XP ranks: SGLang 0.5.17's with a loop in which all ranks run one plan.

Rank 0 takes requests in and decides; every rank runs its part, decodes what lives on it, and answers for it. Requests,
batches and results are SGLang's own. While the device runs one iteration the ranks agree on the next: what they say of
themselves is as it will be when that one has ended, but that requests may end which nobody can know of.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import zmq
from sglang.srt.managers.io_struct import AbortReq, BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.utils import DynamicGradMode

from sglang_ext.compat.scheduler import ConfluxScheduler
from sglang_ext.compat.xp_grammar import Grammars, key_of, refused_here
from sglang_ext.compat.xp_leader import Leader
from sglang_ext.compat.xp_messages import SHARED, refusal, unsupported
from sglang_ext.compat.xp_rank import XpRank
from sglang_ext.compat.xp_status import InFlight, status_of
from sglang_ext.iteration import Half
from sglang_ext.xp.exchange import Exchange
from sglang_ext.xp.plan import Admission, Piecework, Plan, Retracted, Status

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

# How long rank 0 waits for a request before it lets the others know that it lives.
IDLE_S = 1.0
# Messages that may be followed while a forward runs; before any other its results are taken.
_AT_ANY_TIME = (TokenizedGenerateReqInput, BatchTokenizedGenerateReqInput, AbortReq)


class XpScheduler(ConfluxScheduler):
    """One rank of a server with ``--conflux-xp``."""

    def __init__(self, server_args: Any, port_args: Any, gpu_id: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(server_args, port_args, gpu_id, *args, **kwargs)
        own = server_args._conflux
        ranks = own["xp"]
        self.exchange = Exchange(own["xp_rank"], ranks, own["xp_port"], torch.device(self.device))
        self.rank = XpRank(self, self.exchange)
        self.leader = Leader(self, ranks) if self.exchange.rank == 0 else None
        self._kept: dict[str, Req] = {}
        self._retracted: list[Retracted] = []
        self._statuses: list[Status] = []
        self._planned: Plan | None = None
        self._grammars = Grammars(self.grammar_manager)
        self._request: Any = None
        self.idle_sleeper = None
        # While it is prefilled a prompt takes its own slots and, sharded, an Nth of as many.
        slots = self.max_total_num_tokens
        self.max_req_input_len = min(self.max_req_input_len, (slots - 1) * ranks // (ranks + 1) - 1)
        if self.leader is not None:
            self._poller = zmq.Poller()
            self._poller.register(self.ipc_channels.recv_from_tokenizer, zmq.POLLIN)
            self._poller.register(self.ipc_channels.recv_from_rpc, zmq.POLLIN)

    @property
    def paused(self) -> bool:
        """Whether SGLang's ``/pause_generation`` holds everything up."""
        return bool(self._engine_paused)

    # ---- the loop

    @DynamicGradMode()
    def event_loop_normal(self) -> None:
        while not self._iterate():
            pass

    def _iterate(self) -> bool:
        """One iteration, at the same time on all ranks; whether it was the last."""
        plan, self._planned = self._planned or self._agree([]), None
        in_flight = self._run(plan)
        if in_flight and not plan.stop:
            self._planned = self._agree(in_flight)
        self._take(in_flight)
        return bool(plan.stop)

    def _agree(self, in_flight: InFlight) -> Plan:
        """The next iteration's plan, from requests that have come and what every rank will have after ``in_flight``."""
        if self.leader is not None:
            if self.leader.idle and not self.grammar_manager.has_waiting_grammars():
                self._poller.poll(1e3 * IDLE_S)
            received = self.request_receiver.recv_requests()
            if not all(isinstance(message, _AT_ANY_TIME) for message in received):
                self._take(in_flight)
            self.process_input_requests(received)
            self._take_ready_grammars()
            self.leader.idle = False
        retracted, self._retracted = self._retracted, []
        statuses = self.exchange.gather(status_of(self, retracted, in_flight))
        plan = None
        if self.leader is not None:
            self._statuses = statuses
            begin_s = time.perf_counter()
            plan = self.leader.plan(statuses)
            self.controller.planned(time.perf_counter() - begin_s)
        agreed: Plan = self.exchange.broadcast(plan)
        return agreed

    def _take(self, in_flight: InFlight) -> None:
        """Take the results of what was launched; ends when the device has made them."""
        while in_flight:
            self._process(*in_flight.pop(0))

    def _run(self, plan: Plan) -> InFlight:
        """Launch a plan's forward."""
        if self.leader is None:
            for message in plan.shared:
                self._request_dispatcher(message)  # rank 0 answers
            for key, reasoning in plan.grammars:
                self._grammars.begin(key, reasoning)
            self._grammars.keep()
            self.gracefully_exit = plan.stop
        for beginning in plan.aborted:
            self._abort(beginning, {admission.rid for admission in plan.admissions})
        if self.paused:
            return []
        for admission in plan.admissions:
            req = self._req_of(admission) if admission.owner == self.exchange.rank else None
            self.rank.admit(admission, req)
        running = None
        if not self.running_batch.is_empty():
            self.running_batch = self.update_running_batch(self.running_batch)
            if not self.running_batch.is_empty():
                running = self.running_batch
        if plan.chunks:
            self.forward_ct += 1
            return self._prefill(plan.chunks, running)
        if running is not None:
            return [(running, self.run_batch(running))]
        if not self.rank.prompts and not self._kept:
            self.on_idle()
        return []

    def _prefill(self, chunks: list[Piecework], running: ScheduleBatch | None) -> InFlight:
        """A forward of pieces and decodes."""
        config = self.controller.config
        targets_s = (req.conflux.tbt_slo_s for req in running.reqs) if running is not None else ()
        iteration = self.controller.begin(
            None,
            "temporal",
            "xp",
            tbt_slo_s=min(targets_s, default=config.tbt_slo_s),
            running=running.batch_size() if running is not None else 0,
            waiting=len(self.waiting_queue),
        )
        in_flight = self.rank.run(chunks, running, self.controller.clock)
        work = self.rank.work
        if work.q:
            iteration.learnable = work.own
            tpcs = self.controller.model.total_tpcs
            iteration.halves.append(Half(work.phase, tpcs, work.q, work.c, len(work.q), [self.rank.span]))
            self.controller.launched(iteration)
        self.controller.poll()
        return in_flight

    def _process(self, batch: ScheduleBatch, result: Any) -> None:
        self.process_batch_result(batch, result)
        if batch is self.running_batch:
            return
        batch.filter_batch()
        if batch.is_empty():
            return
        if self.running_batch.is_empty():
            self.running_batch = batch
        else:
            self.running_batch.merge_batch(batch)

    # ---- requests

    def keep(self, req: Req) -> None:
        """A request that will be prefilled for this rank."""
        self._kept[req.rid] = req

    def _req_of(self, admission: Admission) -> Req:
        if admission.rid not in self._kept:
            self._make(admission)
        req = self._kept.pop(admission.rid)
        req.xp_placed = True
        req.time_stats.set_forward_entry_time()
        return req

    def _make(self, admission: Admission) -> None:
        """The request of a message that rank 0 has taken in."""
        self._grammars.keep(wait_for=key_of(admission.request))
        self.handle_generate_request(admission.request)
        while self._grammars.waits_for(admission.request) is not None:
            self._take_ready_grammars()
        req = self._kept[admission.rid]
        req.conflux.arrival_s = admission.arrival_s
        if refused_here(req, admission.tokens):
            self.controller.fell_back("xp_grammar")

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        assert self.leader is not None
        taken = []
        for message in recv_reqs:
            if (answer := refusal(message)) is not None:
                self.ipc_channels.send_to_tokenizer.send_output(answer, message)
                continue
            taken.append(message)
            if isinstance(message, SHARED):
                self.leader.share(message)
        super().process_input_requests(taken)

    def handle_generate_request(self, recv_req: Any) -> Any:
        self._request = recv_req
        result = super().handle_generate_request(recv_req)
        waits = self._grammars.waits_for(recv_req)
        if waits is not None:
            waits.xp_request = recv_req
            if self.leader is not None:
                self.leader.compile(waits.grammar_key, waits.require_reasoning)
        return result

    def objection(self, request: Any) -> str | None:
        why = unsupported(request)
        if why is not None:
            return f"{why} with --conflux-xp yet: leave it out, or serve without --conflux-xp"
        return super().objection(request)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> Any:
        if is_retracted or getattr(req, "xp_placed", False):
            self._kept[req.rid] = req
            self._retracted.append(Retracted(req.rid, [*req.origin_input_ids, *req.output_ids]))
            return None
        if self.leader is None:
            self.note(req)
            req.time_stats.set_wait_queue_entry_time()
            return self.keep(req)
        self.refuse(req)
        if isinstance(req.to_finish, FINISH_ABORT):
            # Stock would run it once with a prompt of one token.
            req.finished_reason = req.to_finish
            return self.output_streamer.stream_output([req], req.return_logprob)
        self.note(req)
        if not hasattr(req, "xp_request"):
            req.xp_request = self._request
        return super()._add_request_to_queue(req)

    def abort_request(self, recv_req: AbortReq) -> None:
        super().abort_request(recv_req)
        if self.leader is not None:
            self.leader.abort("" if recv_req.abort_all else recv_req.rid)

    def _abort(self, beginning: str, new: set[str]) -> None:
        """End what this rank has of requests whose names begin so, but for ``new`` ones, which came later."""
        for rid in [rid for rid in self.rank.prompts if rid.startswith(beginning)]:
            batch = self.rank.drop(rid)
            if batch is not None:
                (req,) = batch.reqs
                release_kv_cache(req, self.tree_cache, is_insert=False)
                self._say_aborted(req)
        self._retracted = [one for one in self._retracted if not one.rid.startswith(beginning)]
        for rid in [rid for rid in self._kept if rid.startswith(beginning) and rid not in new]:
            self._say_aborted(self._kept.pop(rid))
        for req in self.running_batch.reqs:
            if not req.finished() and req.rid.startswith(beginning):
                req.to_finish = FINISH_ABORT()

    def _say_aborted(self, req: Req) -> None:
        self.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        own = bool(super().is_fully_idle(for_health_check))
        if for_health_check:
            # Only what this rank makes answers a check; if it makes nothing the check is a request like others.
            return own
        others = any(len(status.decode_context) for status in self._statuses)
        busy = self.leader is not None and (self.leader.busy or others)
        return own and not busy and not self.rank.prompts

    # ---- what others see

    def get_internal_state(self, recv_req: Any) -> Any:
        output = super().get_internal_state(recv_req)
        output.internal_state["conflux"]["xp"] = {
            "ranks": self.exchange.ranks,
            "rank": [
                status.counters | {"decodes": len(status.decode_context), "slots": status.slots}
                for status in self._statuses
            ],
        }
        return output
