"""Communicators of their own for a prefill that runs beside decode steps, in SGLang 0.5.17.

Two streams must not use one communicator at once: ranks would meet in different collectives. A window's decode steps
are CUDA graphs, which keep the tensor-parallel group that they were captured with; its prefill is launched with this
one in that group's place. Nothing else asks for a group meanwhile: no step is launched while the prefill is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.device_communicators.triton_symm_mem_ag import MultimemAllGatherer

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

logger = logging.getLogger(__name__)

# Ways to add up over ranks that keep one workspace for all groups.
_SHARED = ("enable_symm_mem", "enable_torch_symm_mem", "enable_mscclpp", "enable_flashinfer_allreduce_fusion")


def obstacle(server_args: Any) -> str | None:
    """Why a server with several ranks cannot run two halves at once, or None; known before it starts."""
    for name in _SHARED:
        if getattr(server_args, name, False):
            return f"with --{name.replace('_', '-')} both would use one workspace"
    if server_args.disable_custom_all_reduce:
        # All blocks of NCCL's kernel have to run at once, and a small partition may not have the room.
        return "with --disable-custom-all-reduce decode steps on few SMs could hang"
    return None


def decode_adds_up_itself() -> bool:
    """Whether SGLang's own all-reduce works between these GPUs, which runs on however few SMs."""
    own = parallel_state.get_tp_group().ca_comm
    return own is not None and not own.disabled


class PrefillGroup:
    """A second tensor-parallel group of the same ranks. All ranks have to make theirs at the same time.

    ``model``'s own ways to gather over NVLink multicast, one buffer and one set of flags each, stay with the decode
    steps: a prefill's logits are gathered by NCCL.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._gatherers = [
            value
            for module in model.modules()
            for value in vars(module).values()
            if isinstance(value, MultimemAllGatherer)
        ]
        stock = parallel_state.get_tp_group()
        logger.info("conflux: a second group of ranks %s, conflux_prefill_tp, for windows' prefills", stock.ranks)
        self._group: GroupCoordinator = parallel_state.init_model_parallel_group(
            [stock.ranks],
            stock.local_rank,
            torch.distributed.get_backend(stock.device_group),
            group_name="conflux_prefill_tp",
        )
        if self._group.pynccl_comm is not None and self._group.pynccl_comm.available:
            # Outside of graphs stock leaves NCCL to torch, whose own streams have no mask.
            self._group.pynccl_comm.disabled = False
            self._connect()

    def _connect(self) -> None:
        """NCCL connects ranks at the first use of each way, which may wait for all that runs on the GPU."""
        nccl, device = self._group.pynccl_comm, self._group.device
        for count in (1 << 10, 1 << 24):
            values = torch.zeros(count, dtype=torch.bfloat16, device=device)
            nccl.all_reduce(values)
            nccl.all_gather(torch.empty(count * self._group.world_size, dtype=values.dtype, device=device), values)
        torch.cuda.synchronize()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let whatever asks for the tensor-parallel group find this one."""
        stock, attention = parallel_state._TP, parallel_state._ATTN_TP
        states = [gatherer._state for gatherer in self._gatherers]
        for gatherer in self._gatherers:
            gatherer._state = None
        parallel_state._TP = self._group
        if attention is stock:
            parallel_state._ATTN_TP = self._group
        try:
            yield
        finally:
            parallel_state._TP, parallel_state._ATTN_TP = stock, attention
            for gatherer, state in zip(self._gatherers, states, strict=True):
                gatherer._state = state
