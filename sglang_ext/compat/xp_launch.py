"""Starts the scheduler processes of an XP server, one for each rank, in SGLang 0.5.17."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

from sglang.srt.utils.network import is_port_available


def launch(original: Callable[..., Any], cls: type, server_args: Any, port_args: Any, *args: Any, **kw: Any) -> Any:
    """What SGLang does for a server's one scheduler, for every rank; the results as if they were one server's.

    Each is a whole server's scheduler, with the whole model, on a GPU of its own. Rank 0 alone hears requests; all
    answer to the same detokenizer.
    """
    own = server_args._conflux
    port, *rank_ports = _free_ports(1 + own["xp"])
    results, processes = [], []
    for rank in range(own["xp"]):
        one = _own(server_args)
        one._conflux = own | {"xp_rank": rank, "xp_port": port}
        if rank:
            one._conflux |= {"learner_address": None, "record": None}
            gpu_id = server_args.base_gpu_id + rank * server_args.gpu_id_step
            # Of the same seed, two ranks would sample the same for the same prompt.
            seed = server_args.random_seed + rank
            one.override("conflux", base_gpu_id=gpu_id, enable_metrics=False, random_seed=seed)
        ports = _ports(server_args, port_args) if rank else port_args
        if rank or server_args.nccl_port is None:
            ports.nccl_port = rank_ports[rank]
        result, started = original(cls, one, ports, *args, **kw)
        results.append(result)
        processes += started
    whole = results[0]
    waits = [result.wait_for_ready for result in results]

    def wait_for_ready() -> None:
        for wait in waits:
            wait()
        for result in results[1:]:
            whole.scheduler_infos.extend(result.scheduler_infos)

    def block_until_scheduler_exits() -> None:
        for process in processes:
            process.join()

    whole.all_child_pids.extend(pid for result in results[1:] for pid in result.all_child_pids)
    whole.wait_for_ready, whole.block_until_scheduler_exits = wait_for_ready, block_until_scheduler_exits
    return whole, processes


def _free_ports(count: int) -> list[int]:
    """So many free ports below those that systems give to clients: ranks listen on them only seconds later."""
    tries = random.SystemRandom().sample(range(20_000, 31_000), 1000)
    return list(islice(filter(is_port_available, tries), count))


def _ports(server_args: Any, port_args: Any) -> Any:
    """Addresses of a rank that hears no requests of its own."""
    ports = type(port_args).init_new(server_args)
    ports.tokenizer_ipc_name, ports.detokenizer_ipc_name = port_args.tokenizer_ipc_name, port_args.detokenizer_ipc_name
    return ports


def _own(server_args: Any) -> Any:
    """A copy that can be overridden by itself: SGLang keeps what was overridden in lists, which a copy would share."""
    one = copy.copy(server_args)
    for name in ("_resolved_overrides", "_runtime_mutations"):
        if getattr(one, name, None) is not None:
            setattr(one, name, list(getattr(one, name)))
    return one
