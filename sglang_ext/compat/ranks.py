"""One decision for all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch.distributed
from sglang.srt.utils import broadcast_pyobj

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

T = TypeVar("T")


def agree(scheduler: Scheduler, decide: Callable[[], T]) -> T:
    """What rank 0 decides. Ranks would diverge on their clocks and learnt models, and then deadlock."""
    ranks = scheduler.ps
    if ranks.tp_size == 1:
        return decide()
    mine = [decide()] if ranks.tp_rank == 0 else []
    group = scheduler.tp_group
    return broadcast_pyobj(mine, group.rank, scheduler.tp_cpu_group, src=group.ranks[0])[0]


def common(scheduler: Scheduler, levels: tuple[int, ...]) -> tuple[int, ...]:
    """The levels that every rank's GPU offers, ascending: a partition that one of them lacks would end in a deadlock.

    Called once by every rank, at the start.
    """
    return tuple(sorted(set(levels).intersection(*_of_all(scheduler, levels))))


def all_can(scheduler: Scheduler, own: bool) -> bool:
    """Whether every rank can, ``own`` being this one's word; all have to call this at the same point."""
    return all(_of_all(scheduler, own))


def _of_all(scheduler: Scheduler, mine: T) -> list[T]:
    if scheduler.ps.tp_size == 1:
        return [mine]
    found: list[T] = [mine] * scheduler.ps.tp_size
    torch.distributed.all_gather_object(found, mine, group=scheduler.tp_cpu_group)
    return found
