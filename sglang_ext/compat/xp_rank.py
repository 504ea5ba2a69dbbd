"""One rank's part of an XP iteration, in SGLang 0.5.17: KV slots, the batch of pieces and decodes, what comes of it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats, QueueCount
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_ext.compat.xp_attention import Rows, ShardTable, XpAttention
from sglang_ext.policy.spread import ROWS_APIECE, as_one_request, piece_order, shard_slots
from sglang_ext.xp.plan import Admission, Piecework

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ext.timing import Clock, Span
    from sglang_ext.xp.exchange import Exchange

# Prompts whose prefill may be under way at once.
MOST_PROMPTS = 64


@dataclass(slots=True)
class Prompt:
    """A prompt whose prefill is under way. ``slots``: what it takes of this rank's KV cache while it is sharded;
    ``row`` of the shard table; ``batch``: its request and KV slots on the rank where it will decode, else None."""

    tokens: list[int]
    owner: int
    row: int
    slots: torch.Tensor
    batch: ScheduleBatch | None = None
    rows: int = 0
    """Of its tokens, how many this rank has taken through the layers."""


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
        self._table = ShardTable(MOST_PROMPTS + 1, self._runner.model_config.context_len + 4, self._device)
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
        prompt = Prompt(admission.tokens, admission.owner, row, slots)
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
    ) -> Iterator[tuple[ScheduleBatch, Any]]:
        """One forward of this rank's pieces of ``chunks`` and of ``running``, ready to decode; ``span`` is its times.

        Gives batches and their results: the running one, then of each prompt that ends and decodes here.
        """
        self._launched_s = time.monotonic()
        self.work = self._work(chunks, running)
        decode = None
        if running is not None:
            resolve_forward_inputs(running, self._scheduler.future_map)
            decode = ForwardBatch.init_new(running, self._runner, return_hidden_states_before_norm=False)
        rows, forward = self._compose(chunks, decode)
        self.span = clock.start()
        logits = self._forward(rows, forward)
        clock.stop(self.span)
        # The logits' lines: this rank's pieces in the order of the chunks, then its decodes.
        own = [chunk.rid for chunk in chunks if chunk.pieces[self._exchange.rank]]
        if running is not None and decode is not None:
            lines = torch.arange(len(own), len(own) + decode.batch_size, device=self._device)
            yield running, self._sample(running, decode, logits, lines)
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
                yield batch, self._sample(batch, _to_sample(batch), logits, self._index([own.index(chunk.rid)]))

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

    # ---- what a forward is made of

    def _compose(self, chunks: list[Piecework], decode: ForwardBatch | None) -> tuple[Rows, ForwardBatch]:
        ranks, rank = self._exchange.ranks, self._exchange.rank
        own = [(chunk, *_span(chunk, self.prompts[chunk.rid].owner, rank, ranks)) for chunk in chunks]
        own = [(chunk, start, end) for chunk, start, end in own if end > start]
        ids = [token for chunk, start, end in own for token in self.prompts[chunk.rid].tokens[start:end]]
        places = [at for _, start, end in own for at in range(start, end)]
        lengths = [end - start for _, start, end in own]
        pieces, decodes = len(ids), decode.batch_size if decode is not None else 0
        input_ids, positions = [self._index(ids)], [self._index(places)]
        if decode is not None:
            input_ids.append(decode.input_ids.to(torch.int64))
            positions.append(decode.positions.to(torch.int64))
        if not pieces and not decodes:
            # Layers need a row to work on.
            input_ids, positions, lengths = [self._index([0])], [self._index([0])], [1]
        lengths = [*lengths, *[1] * decodes]
        ends = [*(end for _, _, end in own), *(decode.seq_lens_cpu.tolist() if decode is not None else [])] or [1]
        forward = _extend_batch(
            torch.cat(input_ids), torch.cat(positions), lengths, ends, torch.zeros(len(lengths), dtype=torch.int64)
        )
        return self._rows(chunks, pieces, decodes, decode), forward

    def _rows(self, chunks: list[Piecework], pieces: int, decodes: int, decode: ForwardBatch | None) -> Rows:
        ranks, rank = self._exchange.ranks, self._exchange.rank
        piece_of = [sum(chunk.pieces[other] for chunk in chunks) for other in range(ranks)]
        # Where a rank's rows of the next chunk come among all that arrive, which are in the order of ranks.
        arrives = [sum(piece_of[:other]) for other in range(ranks)]
        order: list[int] = []
        leaving: list[list[int]] = [[] for _ in range(ranks)]
        arriving: list[list[int]] = [[] for _ in range(ranks)]
        own_row = 0
        for chunk in chunks:
            prompt, start = self.prompts[chunk.rid], chunk.start
            for other in piece_order(prompt.owner, ranks):
                count = chunk.pieces[other]
                order += range(arrives[other], arrives[other] + count)
                arrives[other] += count
                if prompt.owner == rank:
                    arriving[other] += self._decode_slots(prompt, start, start + count)
                start += count
            mine = chunk.pieces[rank]
            leaving[prompt.owner] += range(own_row, own_row + mine)
            own_row += mine
        own, leaving[rank] = leaving[rank], []
        own_at, arriving[rank] = arriving[rank], []
        indices = self._index(order)
        back = torch.empty_like(indices)
        back[indices] = torch.arange(len(indices), device=indices.device)
        return Rows(
            pieces=pieces,
            decodes=decodes,
            piece_of=piece_of,
            order=indices,
            back=back,
            shard_batch=self._shard_batch(chunks) if chunks else None,
            decode_batch=decode,
            leaving=self._index([row for rows in leaving for row in rows]),
            leaving_to=[len(rows) for rows in leaving],
            arriving_from=[len(slots) for slots in arriving],
            arriving_at=self._index([slot for slots in arriving for slot in slots]),
            own=self._index(own),
            own_at=self._index(own_at),
        )

    def _decode_slots(self, prompt: Prompt, start: int, end: int) -> list[int]:
        assert prompt.batch is not None
        slots: list[int] = prompt.batch.out_cache_loc[start:end].tolist()
        return slots

    def _shard_batch(self, chunks: list[Piecework]) -> ForwardBatch:
        table = self._table.req_to_token
        table_rows = [self.prompts[chunk.rid].row for chunk in chunks]
        lengths, ends = [chunk.end - chunk.start for chunk in chunks], [chunk.end for chunk in chunks]
        places = [at for chunk in chunks for at in range(chunk.start, chunk.end)]
        batch = _extend_batch(
            self._index([0] * len(places)), self._index(places), lengths, ends, self._index(table_rows)
        )
        at = [table[row, chunk.start : chunk.end] for row, chunk in zip(table_rows, chunks, strict=True)]
        batch.out_cache_loc = torch.cat(at).to(torch.int64)
        return batch

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _span(chunk: Piecework, owner: int, rank: int, ranks: int) -> tuple[int, int]:
    """Which tokens of the prompt are ``rank``'s piece."""
    start = chunk.start
    for other in piece_order(owner, ranks):
        if other == rank:
            break
        start += chunk.pieces[other]
    return start, start + chunk.pieces[rank]


def _extend_batch(
    input_ids: torch.Tensor, positions: torch.Tensor, lengths: list[int], ends: list[int], table_rows: torch.Tensor
) -> ForwardBatch:
    """Requests of so many new tokens each, up to ``ends``."""
    device = input_ids.device
    ends_cpu = torch.tensor(ends, dtype=torch.int64)
    lengths_cpu = torch.tensor(lengths, dtype=torch.int32)
    prefixes = (ends_cpu - lengths_cpu).to(torch.int32)
    starts = torch.cumsum(lengths_cpu, dim=0).to(torch.int32) - lengths_cpu
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=input_ids,
        req_pool_indices=table_rows.to(device),
        seq_lens=ends_cpu.to(device),
        out_cache_loc=torch.empty(0, dtype=torch.int64, device=device),
        seq_lens_sum=int(ends_cpu.sum()),
        orig_seq_lens=ends_cpu.to(torch.int32).to(device),
        seq_lens_cpu=ends_cpu,
        positions=positions,
        extend_num_tokens=len(input_ids),
        extend_seq_lens=lengths_cpu.to(device),
        extend_prefix_lens=prefixes.to(device),
        extend_start_loc=starts.to(device),
        extend_prefix_lens_cpu=prefixes.tolist(),
        extend_seq_lens_cpu=lengths_cpu.tolist(),
        extend_logprob_start_lens_cpu=lengths_cpu.tolist(),
        num_token_non_padded_cpu=len(input_ids),
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def _to_sample(batch: ScheduleBatch) -> ForwardBatch:
    """As much of a forward of one request's whole prompt as sampling looks at."""
    end = int(batch.seq_lens_cpu[0])
    one = torch.zeros(1, dtype=torch.int64, device=batch.seq_lens.device)
    forward = _extend_batch(one, one, [1], [end], one)
    forward.sampling_info = batch.sampling_info
    forward.return_logprob = batch.return_logprob
    forward.top_logprobs_nums, forward.token_ids_logprobs = batch.top_logprobs_nums, batch.token_ids_logprobs
    return forward


def _lines_of(logits: Any, lines: torch.Tensor) -> Any:
    """The same output for some of its requests."""
    return dataclasses.replace(logits, next_token_logits=logits.next_token_logits[lines])
