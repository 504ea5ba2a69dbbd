"""Rank 0 of an XP server decides for all: which prompts begin, where they will decode, who prefills what next."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_ext.compat.planner import QueueOrder, delivered_in, queue_order
from sglang_ext.compat.xp_grammar import Key
from sglang_ext.compat.xp_rank import MOST_PROMPTS
from sglang_ext.policy.spread import RankLoad, Waiting, place, shard_slots, spread
from sglang_ext.xp.plan import Admission, Piecework, Plan, Status

if TYPE_CHECKING:
    from sglang_ext.compat.xp_scheduler import XpScheduler

logger = logging.getLogger(__name__)

# Slots kept for what a new request may still decode, as SGLang's admission does.
MOST_RESERVED = 4096
# Prefill tokens of an iteration for each rank, if no more keep the target: prefill must not starve.
LEAST_TOKENS = 32


@dataclass(slots=True)
class _Active:
    """A prompt whose prefill has begun; ``done`` of its ``tokens`` are planned already."""

    rid: str
    tokens: int
    owner: int
    done: int = 0


class Leader:
    """Plans the iterations of ``scheduler``'s server of so many ranks."""

    def __init__(self, scheduler: XpScheduler, ranks: int) -> None:
        self._scheduler, self._ranks = scheduler, ranks
        chunk = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        self._budget = min(chunk, scheduler.max_prefill_tokens) * ranks
        self._active: list[_Active] = []
        self._retracted: deque[tuple[str, int, list[int]]] = deque()
        self._aborted: list[str] = []
        self._shared: list[Any] = []
        self._grammars: list[tuple[Key, bool]] = []
        self._order = QueueOrder()
        self.idle = False

    def abort(self, beginning: str) -> None:
        """End all requests whose names begin so, wherever they are."""
        self._aborted.append(beginning)

    def share(self, message: Any) -> None:
        """Let the other ranks follow a message of SGLang's too."""
        self._shared.append(message)

    def compile(self, key: Key, reasoning: bool) -> None:
        """Let the other ranks compile a grammar too."""
        self._grammars.append((key, reasoning))

    @property
    def busy(self) -> bool:
        """Whether any prompt waits or is being prefilled, here or on its way back from a rank."""
        return bool(self._active or self._retracted or self._scheduler.waiting_queue)

    def plan(self, statuses: list[Status]) -> Plan:
        """The next iteration, from what every rank has."""
        plan = Plan(shared=self._shared, grammars=self._grammars, stop=bool(self._scheduler.gracefully_exit))
        self._shared, self._grammars = [], []
        for rank, status in enumerate(statuses):
            for one in status.retracted:
                if len(one.tokens) + shard_slots(len(one.tokens), self._ranks) > status.slots:
                    logger.error("conflux: %s has outgrown the KV cache of XP rank %d; it is aborted", one.rid, rank)
                    self._aborted.append(one.rid)
                else:
                    self._retracted.append((one.rid, rank, one.tokens))
        plan.aborted, self._aborted = self._aborted, []
        for beginning in plan.aborted:
            self._active = [one for one in self._active if not one.rid.startswith(beginning)]
            self._retracted = deque(one for one in self._retracted if not one[0].startswith(beginning))
        if self._scheduler.paused:
            self.idle = not (plan.aborted or plan.shared or plan.stop)
            return plan
        loads = [RankLoad(status.decode_context, status.free_slots, status.slots) for status in statuses]
        free_rows = min(status.free_rows for status in statuses)
        plan.admissions = self._admit(loads, free_rows)
        plan.chunks = self._chunks(loads, statuses)
        decoding = any(len(load.decode_context) for load in loads)
        self.idle = not (plan.chunks or plan.admissions or plan.aborted or plan.shared or decoding)
        return plan

    # ---- who begins

    def _admit(self, loads: list[RankLoad], free_rows: int) -> list[Admission]:
        left = self._budget - sum(one.tokens - one.done for one in self._active)
        most = min(MOST_PROMPTS - len(self._active), free_rows)
        found = self._admit_retracted(loads, left, most)
        left -= sum(len(one.tokens) for one in found)
        if not self._retracted:
            found += self._admit_waiting(loads, left, most - len(found))
        self._active += [_Active(one.rid, len(one.tokens), one.owner) for one in found]
        return found

    def _admit_retracted(self, loads: list[RankLoad], left: int, most: int) -> list[Admission]:
        """Those that have waited longest go first, on the rank where they are known."""
        found: list[Admission] = []
        while self._retracted and left > 0 and len(found) < most:
            rid, owner, tokens = self._retracted[0]
            if not self._take(loads, owner, len(tokens), 0):
                break
            self._retracted.popleft()
            found.append(Admission(rid, owner, tokens, None))
            left -= len(tokens)
        return found

    def _admit_waiting(self, loads: list[RankLoad], left: int, most: int) -> list[Admission]:
        found: list[Admission] = []
        queue = self._scheduler.waiting_queue
        if len(queue) > 1 and left > 0 and most > 0:
            now_s, model = time.perf_counter(), self._scheduler.controller.model
            queue[:] = self._order.of(queue, now_s, lambda: queue_order(queue, model, now_s, self._ranks))
        while queue and left > 0 and len(found) < most:
            req = queue[0]
            tokens = list(req.origin_input_ids)
            reserve = self._reserve(req.sampling_params.max_new_tokens, len(tokens), loads)
            owner = place(len(tokens), reserve, loads)
            if owner is None or not self._take(loads, owner, len(tokens), reserve):
                break
            queue.pop(0)
            found.append(Admission(req.rid, owner, tokens, req.xp_request, req.conflux.arrival_s))
            if owner == 0:
                self._scheduler.keep(req)
            left -= len(tokens)
        return found

    def _reserve(self, max_new_tokens: int, tokens: int, loads: list[RankLoad]) -> int:
        """Slots to keep for an answer: no more than an empty rank has."""
        room = min(load.slots for load in loads) - tokens - shard_slots(tokens, self._ranks)
        return max(min(max_new_tokens, MOST_RESERVED, room), 0)

    def _take(self, loads: list[RankLoad], owner: int, tokens: int, reserve: int) -> bool:
        """Take the slots of a prompt from ``loads``, if there are so many."""
        shard = shard_slots(tokens, self._ranks)
        needs = [shard + (tokens + reserve if rank == owner else 0) for rank in range(self._ranks)]
        if any(load.free_slots < need for load, need in zip(loads, needs, strict=True)):
            return False
        for rank, (load, need) in enumerate(zip(loads, needs, strict=True)):
            loads[rank] = load._replace(free_slots=load.free_slots - need)
        return True

    # ---- what is prefilled

    def _chunks(self, loads: list[RankLoad], statuses: list[Status]) -> list[Piecework]:
        waiting = [Waiting(one.tokens, one.done, one.owner) for one in self._active]
        tbt_slo_s = min(status.tbt_slo_s for status in statuses)
        chunks = spread(
            waiting,
            loads,
            self._scheduler.controller.model,
            tbt_slo_s=tbt_slo_s - delivered_in(tbt_slo_s),
            budget=self._budget,
            least=LEAST_TOKENS * self._ranks,
        )
        found = []
        for chunk in chunks:
            one = self._active[chunk.prompt]
            found.append(Piecework(one.rid, chunk.start, chunk.pieces))
            one.done = chunk.end
        self._active = [one for one in self._active if one.done < one.tokens]
        return found
