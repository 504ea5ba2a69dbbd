"""Makes SGLang 0.5.17's batches of one XP iteration's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from sglang_ext.compat.xp_attention import Rows, ShardTable
from sglang_ext.xp.plan import Piecework
from sglang_ext.xp.route import Cut, Part, Route, route

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class Prompt:
    """A prompt whose prefill is under way. ``slots``: what it takes of this rank's KV cache while it is sharded;
    ``row`` of the shard table; ``batch``: its request and KV slots on the rank where it will decode, else None."""

    tokens: torch.Tensor
    owner: int
    row: int
    slots: torch.Tensor
    batch: ScheduleBatch | None = None
    rows: int = 0
    """Of its tokens, how many this rank has taken through the layers."""


def compose(
    chunks: Sequence[tuple[Piecework, Prompt]],
    decode: ForwardBatch | None,
    table: ShardTable,
    rank: int,
    ranks: int,
) -> tuple[Rows, ForwardBatch]:
    """This rank's rows of ``chunks`` and of ``decode``: where they go, and the batch that the model sees."""
    of = route([Cut(chunk.start, chunk.pieces, prompt.owner) for chunk, prompt in chunks], rank, ranks)
    prompts = [prompt for _, prompt in chunks]
    device = table.req_to_token.device
    decodes = decode.batch_size if decode is not None else 0
    input_ids = [prompts[part.chunk].tokens[part.start : part.end] for part in of.own]
    positions = [torch.arange(part.start, part.end, device=device) for part in of.own]
    lengths = [part.end - part.start for part in of.own] + [1] * decodes
    ends = [part.end for part in of.own]
    if decode is not None:
        input_ids.append(decode.input_ids.to(torch.int64))
        positions.append(decode.positions.to(torch.int64))
        ends += decode.seq_lens_cpu.tolist()
    if not lengths:
        # Layers need a row to work on.
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        input_ids, positions, lengths, ends = [nothing], [nothing], [1], [1]
    forward = extend_batch(torch.cat(input_ids), torch.cat(positions), lengths, ends, [0] * len(lengths))
    return _rows(of, prompts, chunks, decode, table), forward


def _rows(
    of: Route,
    prompts: Sequence[Prompt],
    chunks: Sequence[tuple[Piecework, Prompt]],
    decode: ForwardBatch | None,
    table: ShardTable,
) -> Rows:
    device = table.req_to_token.device

    def index(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    return Rows(
        pieces=sum(part.end - part.start for part in of.own),
        decodes=decode.batch_size if decode is not None else 0,
        piece_of=of.piece_of,
        order=index(of.order),
        back=index(of.back),
        shard_batch=_shard_batch(chunks, table) if chunks else None,
        decode_batch=decode,
        leaving=index(of.leaving),
        leaving_to=of.leaving_to,
        arriving_from=of.arriving_from,
        arriving_at=_decode_slots(of.arriving, prompts, device),
        own=index(of.staying),
        own_at=_decode_slots(of.staying_parts, prompts, device),
    )


def _decode_slots(parts: Sequence[Part], prompts: Sequence[Prompt], device: torch.device) -> torch.Tensor:
    """KV slots of prompts that decode here."""
    slots = [torch.empty(0, dtype=torch.int64, device=device)]
    for part in parts:
        batch = prompts[part.chunk].batch
        assert batch is not None
        slots.append(batch.out_cache_loc[part.start : part.end].to(torch.int64))
    return torch.cat(slots)


def _shard_batch(chunks: Sequence[tuple[Piecework, Prompt]], table: ShardTable) -> ForwardBatch:
    """The chunks as requests of the sharded pool."""
    device = table.req_to_token.device
    positions = torch.cat([torch.arange(chunk.start, chunk.end, device=device) for chunk, _ in chunks])
    lengths, ends = [chunk.end - chunk.start for chunk, _ in chunks], [chunk.end for chunk, _ in chunks]
    batch = extend_batch(torch.zeros_like(positions), positions, lengths, ends, [prompt.row for _, prompt in chunks])
    at = [table.req_to_token[prompt.row, chunk.start : chunk.end] for chunk, prompt in chunks]
    batch.out_cache_loc = torch.cat(at).to(torch.int64)
    return batch


def extend_batch(
    input_ids: torch.Tensor, positions: torch.Tensor, lengths: list[int], ends: list[int], table_rows: list[int]
) -> ForwardBatch:
    """Requests of so many new tokens each, up to ``ends``, whose KV slots are in these rows of the table."""
    device = input_ids.device
    ends_cpu = torch.tensor(ends, dtype=torch.int64)
    lengths_cpu = torch.tensor(lengths, dtype=torch.int32)
    prefixes = (ends_cpu - lengths_cpu).to(torch.int32)
    starts = torch.cumsum(lengths_cpu, dim=0).to(torch.int32) - lengths_cpu
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=input_ids,
        req_pool_indices=torch.tensor(table_rows, dtype=torch.int64, device=device),
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


def to_sample(batch: ScheduleBatch) -> ForwardBatch:
    """As much of a forward of one request's whole prompt as sampling looks at."""
    one = torch.zeros(1, dtype=torch.int64, device=batch.seq_lens.device)
    forward = extend_batch(one, one, [1], [int(batch.seq_lens_cpu[0])], [0])
    forward.sampling_info = batch.sampling_info
    forward.sampling_info.grammars = [req.grammar for req in batch.reqs] if batch.has_grammar else None
    forward.return_logprob = batch.return_logprob
    forward.top_logprobs_nums, forward.token_ids_logprobs = batch.top_logprobs_nums, batch.token_ids_logprobs
    return forward
