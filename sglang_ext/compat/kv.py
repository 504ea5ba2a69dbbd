"""KV slots ahead of the accepted length, on SGLang 0.5.17's pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_token_slots
from sglang.srt.mem_cache.common import evict_from_tree_cache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


def ceil_to(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def chunk_reserve(chunked_req: Req | None, page_size: int) -> int:
    """Slots that the rest of a prompt in chunks still needs.

    Stock never decodes between two chunks, so it checks their room once, at admission; whoever decodes in between
    must leave it alone.
    """
    if chunked_req is None:
        return 0
    rest = len(chunked_req.full_untruncated_fill_ids) - chunked_req.extend_range.end
    return ceil_to(max(rest, 0), page_size) + page_size


def room(scheduler: Scheduler) -> int:
    """Slots that are free or can be evicted, beyond what a prompt in chunks has reserved."""
    tree = scheduler.tree_cache
    free = scheduler.token_to_kv_pool_allocator.available_size()
    evictable = 0 if tree.is_chunk_cache() else tree.evictable_size()
    return int(free + evictable - chunk_reserve(scheduler.chunked_req, scheduler.page_size))


def make_room(scheduler: Scheduler, slots: int) -> bool:
    """Evict until ``slots`` are free, if they can be had without touching the reserve."""
    if room(scheduler) < slots:
        return False
    evict_from_tree_cache(scheduler.tree_cache, slots)
    return bool(scheduler.token_to_kv_pool_allocator.available_size() >= slots)


def look_ahead_slots(lengths: torch.Tensor, steps: int, page_size: int) -> int:
    """New slots for ``steps`` more tokens of each request; ``lengths`` are its tokens in KV, int [n], on the CPU."""
    if page_size == 1:
        return int(lengths.numel()) * steps
    pages = (lengths + steps + page_size - 1) // page_size - (lengths + page_size - 1) // page_size
    return int(pages.sum()) * page_size


def most_look_ahead(lengths: torch.Tensor, slots: int, page_size: int, most: int) -> int:
    """The largest number of steps, at most ``most``, whose slots fit into ``slots``."""
    steps = most
    while steps > 0 and look_ahead_slots(lengths, steps, page_size) > slots:
        steps -= 1
    return steps


def allocate_ahead(scheduler: Scheduler, batch: ScheduleBatch, steps: int) -> torch.Tensor:
    """Take ``steps`` slots for each request of a decode batch and enter them into ``req_to_token``.

    Returns the locations, int64 [requests, steps]. The requests' own accounting is left alone: who calls this owns
    the slots. Room must have been made.
    """
    lengths, lengths_cpu = batch.seq_lens, batch.seq_lens_cpu
    rows = batch.req_pool_indices
    count = len(batch.reqs) * steps
    if scheduler.page_size == 1:
        flat = alloc_token_slots(scheduler.tree_cache, count)
    else:
        last = scheduler.req_to_token_pool.req_to_token[rows, lengths - 1].to(torch.int64)
        flat = alloc_paged_token_slots_extend(
            scheduler.tree_cache, lengths, lengths_cpu, lengths + steps, lengths_cpu + steps, last, count
        )
    locations = flat.view(len(batch.reqs), steps)
    columns = lengths[:, None] + torch.arange(steps, device=lengths.device)[None, :]
    scheduler.req_to_token_pool.write((rows[:, None], columns), locations.to(torch.int32))
    return locations


def free(scheduler: Scheduler, locations: list[torch.Tensor]) -> None:
    if locations:
        scheduler.token_to_kv_pool_allocator.free(torch.cat(locations))


def pool_state(scheduler: Scheduler) -> dict[str, int]:
    """KV slots and request rows by what holds them; when idle, available and evictable slots are all there are."""
    tree = scheduler.tree_cache
    cached = not tree.is_chunk_cache()
    rows = scheduler.req_to_token_pool
    return {
        "total_slots": int(scheduler.max_total_num_tokens),
        "available_slots": int(scheduler.token_to_kv_pool_allocator.available_size()),
        "evictable_slots": int(tree.evictable_size()) if cached else 0,
        "protected_slots": int(tree.protected_size()) if cached else 0,
        "rows": int(rows.size),
        "free_rows": len(rows.free_slots),
    }
