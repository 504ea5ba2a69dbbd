"""What conflux reads from and does to SGLang 0.5.17's batches."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def shrink(running: ScheduleBatch) -> None:
    """Drop finished requests. Stock reopens admission only where it filters itself."""
    before = running.batch_size()
    running.filter_batch()
    if running.batch_size() < before:
        running.batch_is_full = False


def window_obstacle(running: ScheduleBatch) -> str | None:
    """Why this batch cannot decode ahead of the host, or None. Each reason is a metric label."""
    sampling = running.sampling_info
    if running.return_logprob:
        return "logprob"
    if running.has_grammar:
        return "grammar"
    if running.return_hidden_states:
        return "hidden_states"
    if sampling.penalizer_orchestrator.is_required:
        return "penalty"
    if sampling.has_custom_logit_processor:
        return "logit_processor"
    if running.is_prefill_only:
        return "prefill_only"
    return None


def mix_obstacle(new: ScheduleBatch, running: ScheduleBatch) -> str | None:
    """Why a prefill batch and the running batch cannot share a forward, or None."""
    if new.return_logprob or running.return_logprob:
        return "logprob"
    if new.has_grammar or running.has_grammar:
        return "grammar"
    if any(batch.sampling_info.penalizer_orchestrator.is_required for batch in (new, running)):
        return "penalty"
    if new.input_embeds is not None:
        return "input_embeds"
    if new.return_hidden_states or running.return_hidden_states:
        return "hidden_states"
    if running.is_prefill_only:
        return "prefill_only"
    return None


def mix(new: ScheduleBatch, running: ScheduleBatch) -> ScheduleBatch:
    """Append one decode token of every running request to a prefill batch, as stock's mixed chunk does.

    ``running`` must be filtered and its slots must fit. Returns the empty batch that takes its place.
    """
    running.prepare_for_decode()
    prefills = len(new.reqs)
    # Stock guesses these from output_ids, which lag by one only while an iteration's result is still queued.
    prefix_lens = (running.seq_lens_cpu - 1).tolist()
    new.mix_with_running(running)
    new.prefix_lens = new.prefix_lens[:prefills] + prefix_lens
    new.decoding_reqs = running.reqs
    return ScheduleBatch(reqs=[], batch_is_full=running.batch_is_full)


def decode_step(running: ScheduleBatch, step: int, locations: torch.Tensor) -> ScheduleBatch:
    """The batch of one look-ahead step, a shallow copy of ``running`` that reads the token sampled by the step before.

    ``step`` counts from 0, ``locations`` is int64 [requests, steps]. What stock's ``prepare_for_decode`` does, less
    its allocation and its accounting.
    """
    batch = copy.copy(running)
    batch.forward_mode = ForwardMode.DECODE
    batch.input_embeds = None
    batch.input_ids = None
    batch.out_cache_loc = locations[:, step].contiguous()
    advance(batch, step + 1)
    return batch


def advance(batch: ScheduleBatch, tokens: int) -> None:
    """Move a decode batch's lengths on by ``tokens``; new tensors, since forwards in flight hold the old ones."""
    batch.seq_lens = batch.seq_lens + tokens
    batch.seq_lens_cpu = batch.seq_lens_cpu + tokens
    batch.orig_seq_lens = batch.orig_seq_lens + tokens
    batch.seq_lens_sum = None


def remaining_tokens(requests: list[Req]) -> int:
    """The most tokens that any of these requests may still generate."""
    return max((r.sampling_params.max_new_tokens - len(r.output_ids) for r in requests), default=0)


def work_of(batch: ScheduleBatch) -> tuple[str, list[int], list[int], int]:
    """(phase, q, c, logits_rows) of a batch that is ready to run: new and cached tokens per request."""
    mode = batch.forward_mode
    if mode.is_decode():
        cached = (batch.seq_lens_cpu - 1).tolist()
        return "decode", [1] * len(cached), cached, len(cached)
    phase = "mixed" if mode.is_mixed() else "prefill"
    # The logits of every request's last row are computed, also of a prompt whose chunks go on.
    return phase, list(batch.extend_lens), list(batch.prefix_lens), len(batch.reqs)
