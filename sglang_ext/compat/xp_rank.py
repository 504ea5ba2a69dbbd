"""One rank's part of an XP iteration, in SGLang 0.5.17: KV slots, the batch of pieces and decodes, what comes of it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats, QueueCount
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_ext.compat.xp_attention import Rows, ShardTable, XpAttention
from sglang_ext.compat.xp_rows import Prompt, compose, to_sample
from sglang_ext.policy.spread import ROWS_APIECE, as_one_request, shard_slots
from sglang_ext.xp.plan import Admission, Piecework

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ext.timing import Clock, Span
    from sglang_ext.xp.exchange import Exchange

# Prompts whose prefill may be under way at once.
MOST_PROMPTS = 64


@dataclass(slots=True)
class Work:
    """One forward for the latency model: ``q`` new and ``c`` cached tokens of each request, as if it were the rank's
    own. ``own``: whether the rank had rows of prompts, without which it says nothing of its kind."""

    phase: str
    q: list[int]
    c: list[int]
    own: bool


class XpRank:
    """Prompts under way on rank ``exchange.rank`` of ``scheduler``'s server."""

    def __init__(self, scheduler: Scheduler, exchange: Exchange) -> None:
        self._scheduler, self._exchange = scheduler, exchange
        self._runner = scheduler.tp_worker.model_runner
        self._device = self._runner.device
        width = self._runner.model_config.context_len + exchange.ranks + 4
        self._table = ShardTable(MOST_PROMPTS + 1, width, self._device)
        self._free_rows = list(range(1, MOST_PROMPTS + 1))
        self._attention = XpAttention(self._runner, exchange, self._table)
        self.prompts: dict[str, Prompt] = {}
        self.counters: Counter[str] = Counter()
        self._launched_s = 0.0
        self.work = Work("prefill", [], [], own=False)
        self.span: Span | None = None

    # ---- prompts

    def admit(self, admission: Admission, req: Any | None) -> None:
        """Take the KV slots of a prompt; with its request ``req`` also those it will decode in. The plan left room."""
        ranks, tokens = self._exchange.ranks, len(admission.tokens)
        slots = self._scheduler.token_to_kv_pool_allocator.alloc(shard_slots(tokens, ranks))
        assert slots is not None, "the plan gave a prompt more KV slots than there are"
        row = self._free_rows.pop()
        within = torch.arange(ranks, device=self._device)
        self._table.req_to_token[row, : len(slots) * ranks] = (
            (slots.to(torch.int64)[:, None] * ranks + within).flatten().to(torch.int32)
        )
        ids = torch.tensor(admission.tokens, dtype=torch.int64, device=self._device)
        prompt = Prompt(ids, admission.owner, row, slots)
        if req is not None:
            prompt.batch = self._decode_batch(req)
        self.prompts[admission.rid] = prompt

    def _decode_batch(self, req: Any) -> ScheduleBatch:
        """The batch of one request that stock would prefill as a whole: it takes all KV slots of its prompt."""
        scheduler = self._scheduler
        req.init_next_round_input()
        req.set_extend_range(0, len(req.full_untruncated_fill_ids))
        batch = ScheduleBatch.init_new(
            [req],
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_extend()
        batch.prefill_input_ids_cpu = None
        # What stock logs and counts of a prefill batch.
        batch.prefill_stats = PrefillStats(
            log_input_tokens=batch.extend_num_tokens,
            log_hit_tokens=0,
            new_token_ratio=scheduler.new_token_ratio_tracker.current,
            num_running_reqs=QueueCount.from_reqs(scheduler.running_batch.reqs),
            num_new_seqs=1,
        )
        return batch

    def drop(self, rid: str) -> ScheduleBatch | None:
        """Give back what a prompt was sharded in; what is left is its batch, on the rank that has one."""
        prompt = self.prompts.pop(rid)
        self._scheduler.token_to_kv_pool_allocator.free(prompt.slots)
        self._free_rows.append(prompt.row)
        return prompt.batch

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    # ---- one iteration

    def run(
        self, chunks: list[Piecework], running: ScheduleBatch | None, clock: Clock
    ) -> list[tuple[ScheduleBatch, Any]]:
        """One forward of this rank's pieces of ``chunks`` and of ``running``, ready to decode; ``span`` is its times.

        Returns batches and their results: the running one, then of each prompt that ends and decodes here.
        """
        self._launched_s = time.monotonic()
        self.work = self._work(chunks, running)
        decode = None
        if running is not None:
            resolve_forward_inputs(running, self._scheduler.future_map)
            decode = ForwardBatch.init_new(running, self._runner, return_hidden_states_before_norm=False)
        parts = [(chunk, self.prompts[chunk.rid]) for chunk in chunks]
        rows, forward = compose(parts, decode, self._table, self._exchange.rank, self._exchange.ranks)
        # What comes from the host comes before the forward: after it, it would be waited for with all of that.
        sampled = self._to_sample(chunks, running, decode)
        self.span = clock.start()
        logits = self._forward(rows, forward)
        clock.stop(self.span)
        return [(batch, self._sample(batch, of, logits, lines)) for batch, of, lines in sampled]

    def _to_sample(
        self, chunks: list[Piecework], running: ScheduleBatch | None, decode: ForwardBatch | None
    ) -> list[tuple[ScheduleBatch, ForwardBatch, torch.Tensor]]:
        """Batches that get tokens, and which lines of the logits are theirs; prompts that end are done with."""
        # The logits' lines: this rank's pieces in the order of the chunks, then its decodes.
        own = [chunk.rid for chunk in chunks if chunk.pieces[self._exchange.rank]]
        sampled = []
        if running is not None and decode is not None:
            lines = torch.arange(len(own), len(own) + decode.batch_size, device=self._device)
            sampled.append((running, decode, lines))
        for chunk in chunks:
            prompt = self.prompts[chunk.rid]
            self._count(chunk, prompt)
            if chunk.end < len(prompt.tokens):
                continue
            if len(prompt.tokens) > ROWS_APIECE * self._exchange.ranks:
                self.counters["long_prompts"] += 1
                self.counters["long_prompts_with_rows"] += prompt.rows > 0
            batch = self.drop(chunk.rid)
            if batch is not None:
                at = own.index(chunk.rid)
                sampled.append((batch, to_sample(batch), torch.arange(at, at + 1, device=self._device)))
        return sampled

    def _work(self, chunks: list[Piecework], running: ScheduleBatch | None) -> Work:
        ranks, rank = self._exchange.ranks, self._exchange.rank
        q, c = [], []
        for chunk in chunks:
            if piece := chunk.pieces[rank]:
                q.append(piece)
                c.append(as_one_request(chunk.start, chunk.end - chunk.start, piece, ranks))
        pieces = len(q)
        if running is not None:
            q += [1] * running.batch_size()
            c += (running.seq_lens_cpu - 1).tolist()
        return Work("mixed" if running is not None else "prefill", q, c, bool(pieces))

    def _count(self, chunk: Piecework, prompt: Prompt) -> None:
        mine = chunk.pieces[self._exchange.rank]
        prompt.rows += mine
        self.counters["chunks"] += 1
        self.counters["rows"] += mine
        if self._exchange.rank == 0:
            total = sum(chunk.pieces)
            self.counters["prefilled_tokens"] += total
            self.counters["migrating_tokens"] += total - chunk.pieces[prompt.owner]

    def _sample(self, batch: ScheduleBatch, forward: ForwardBatch, logits: Any, lines: torch.Tensor) -> Any:
        """Next tokens for those ``lines`` of the logits, which are the batch's requests."""
        own = _lines_of(logits, lines)
        result = GenerationBatchResult(logits_output=own, can_run_cuda_graph=False)
        # Log probabilities of the prompt are refused, so none of its tokens count.
        result.extend_input_len_per_req = result.extend_logprob_start_len_per_req = [1] * len(batch.reqs)
        result.next_token_ids = self._runner.sample(own, forward)
        batch.launch_ts, batch.forward_iter = self._launched_s, self._scheduler.forward_ct
        self._scheduler._relay_forward_payload(batch.req_pool_indices, result)
        batch.input_ids = None
        return result

    def _forward(self, rows: Rows, forward: ForwardBatch) -> LogitsProcessorOutput:
        self._attention.begin(rows)
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self._attention)):
            logits = self._runner.model.forward(forward.input_ids, forward.positions, forward)
        self._attention.end()
        return logits


def _lines_of(logits: Any, lines: torch.Tensor) -> Any:
    """The same output for some of its requests."""
    return dataclasses.replace(logits, next_token_logits=logits.next_token_logits[lines])
