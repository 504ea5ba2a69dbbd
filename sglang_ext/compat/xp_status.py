"""What an XP rank says of itself before an iteration, in SGLang 0.5.17."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_ext.compat.xp_leader import MOST_RESERVED
from sglang_ext.xp.plan import Retracted, Status

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.compat.xp_scheduler import XpScheduler

# Batches that were launched and what they make, in the order in which they are to be taken.
InFlight = list[tuple["ScheduleBatch", Any]]


def status_of(scheduler: XpScheduler, retracted: list[Retracted], in_flight: InFlight) -> Status:
    """What the rank will have when it has taken the results of ``in_flight``, if none of its requests ends there."""
    running, rank = scheduler.running_batch, scheduler.rank
    decodes = [req for req in running.reqs if not req.finished()]
    # Those whose prompts end now decode too.
    decodes += [req for batch, _ in in_flight if batch is not running for req in batch.reqs]
    making = {id(req) for batch, _ in in_flight for req in batch.reqs}
    # What answers may still need, as far as SGLang's admission would leave it free.
    begun = [prompt.batch.reqs[0] for prompt in rank.prompts.values() if prompt.batch is not None]
    owed = scheduler.new_token_ratio_tracker.current * sum(
        min(req.sampling_params.max_new_tokens - len(req.output_ids), MOST_RESERVED) for req in decodes + begun
    )
    free = scheduler.token_to_kv_pool_allocator.available_size()
    default_slo_s = scheduler.controller.config.tbt_slo_s
    return Status(
        decode_context=np.array([_tokens(req) + (id(req) in making) for req in decodes], dtype=np.int64),
        tbt_slo_s=min((req.conflux.tbt_slo_s for req in decodes), default=default_slo_s),
        free_slots=max(int(free - owed) - len(decodes), 0),
        slots=scheduler.max_total_num_tokens,
        free_rows=min(rank.free_rows, scheduler.req_to_token_pool.available_size()),
        retracted=retracted,
        counters=_counters(scheduler),
    )


def _counters(scheduler: XpScheduler) -> dict[str, int]:
    rank, exchange = scheduler.rank, scheduler.exchange
    return dict(rank.counters) | {
        "all_to_all_bytes": exchange.all_to_all_bytes,
        "migrated_bytes": exchange.migrated_bytes,
        "free_slots": scheduler.token_to_kv_pool_allocator.available_size(),
        "free_rows": scheduler.req_to_token_pool.available_size(),
        "prompts": len(rank.prompts),
    }


def _tokens(req: Req) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)
