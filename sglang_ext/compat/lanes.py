"""Lanes on a GPU: decode and prefill of a window on streams of their own, on chosen TPCs."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.compat.graphs import Captured, capture_level
from sglang_ext.compat.groups import PrefillGroup
from sglang_ext.compat.ranks import agree

if TYPE_CHECKING:
    from sglang_ext.compat.scheduler import ConfluxScheduler
    from sglang_ext.sm.control import SmControl

logger = logging.getLogger(__name__)

# What forwards may still need when graphs have been captured.
_LEAST_FREE_BYTES = 2 << 30
# Batch sizes to capture for a partition; a batch between two is padded, as in stock.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Several ranks' partitions have at least so many TPCs: all blocks of an NCCL kernel, up to 32, must run at once.
_LEAST_TPCS_FOR_RANKS = 16
# Backends whose state is not shared between instances, so that a decode and a prefill can be in flight at once.
ATTENTION_BACKENDS = ("fa3",)


class GpuLanes:
    """Two lanes of one GPU, taken in turns by SGLang's own ``run_batch``.

    Stock launches every forward on ``scheduler.forward_stream`` and copies its result on ``scheduler.copy_stream``.
    Around the launch of a window's half these are the half's own. What runs outside of windows keeps stock's streams,
    which wait for a window's prefill; its decode steps have ended, on the host's side too, when the window closes.
    """

    concurrent = True
    may_outlast = True

    def __init__(
        self, scheduler: ConfluxScheduler, control: SmControl, *, budget_s: float, serial: bool = False
    ) -> None:
        """``budget_s``: how long capturing may take beyond stock's own."""
        self._scheduler, self._control, self.serial = scheduler, control, serial
        self._runner = scheduler.tp_worker.model_runner
        first = control.levels[0]
        handles = control.handles(first)
        self._total = handles.decode_tpcs + handles.prefill_tpcs
        self._decode = {self._total: control.reserve(first).decode}
        self._contexts: dict[int, Any] = {}
        self._copy = torch.cuda.Stream()
        self._copy_context = torch.cuda.stream(self._copy)
        self._graphs: dict[int, Captured] = {}
        self._prefill_end: torch.cuda.Event | None = None
        self._prefill_group = PrefillGroup(self._runner.model) if scheduler.ps.tp_size > 1 else None
        self._capture(budget_s)
        self.levels = tuple(sorted(self._graphs))

    def _capture(self, budget_s: float) -> None:
        """Decode graphs for the levels, those of most use first, while the start-up budget lasts.

        Capturing exchanges addresses between ranks, so that all capture the same.
        """
        stock = self._runner.decode_cuda_graph_runner
        sizes = [size for size in stock.capture_bs if size in _SIZES] or stock.capture_bs[-1:]
        begin_s, taken_s = time.perf_counter(), 0.0
        least = 0 if self._prefill_group is None else _LEAST_TPCS_FOR_RANKS
        levels = tuple(level for level in self._control.levels if least <= level <= self._total - least)
        for level in _useful_first(levels):
            if self._agreed(time.perf_counter() - begin_s + taken_s > budget_s):
                break
            one_s = time.perf_counter()
            stream = self._control.partition(level).decode
            try:
                captured = capture_level(self._runner, stream, sizes, level)
            except RuntimeError as error:  # out of memory among them
                if self._prefill_group is not None:
                    raise  # the other ranks wait
                # Stock starts here, so conflux does: with the levels that there is room for.
                logger.warning("conflux: no decode graphs on %d TPCs, nor on further levels: %s", level, error)
                traceback.clear_frames(error.__traceback__)
                torch.cuda.empty_cache()
                break
            self._decode[level], self._graphs[level] = stream, captured
            taken_s = time.perf_counter() - one_s
            if self._agreed(torch.cuda.mem_get_info()[0] < _LEAST_FREE_BYTES + captured.mib * 2**20):
                logger.info("conflux: the GPU has no memory for decode graphs on more levels")
                break
        self._capture_s = round(time.perf_counter() - begin_s, 1)

    def _agreed(self, mine: bool) -> bool:
        """Rank 0's answer."""
        return agree(self._scheduler, lambda: mine)

    @contextmanager
    def window(self, tpcs: int) -> Iterator[None]:
        stream, stock = self._decode[tpcs], self._scheduler.forward_stream
        stream.wait_stream(stock)
        try:
            yield
        finally:
            stock.wait_stream(stream)

    @contextmanager
    def decoding(self, tpcs: int) -> Iterator[None]:
        stream = self._decode[tpcs]
        captured = self._graphs.get(tpcs)
        graphs = captured.runner if captured is not None else self._runner.decode_cuda_graph_runner
        with self._in_use(stream, copy=True):
            before = self._runner.decode_cuda_graph_runner
            self._runner.decode_cuda_graph_runner = graphs
            try:
                yield
            finally:
                self._runner.decode_cuda_graph_runner = before

    @contextmanager
    def prefilling(self, tpcs: int) -> Iterator[None]:
        stream, stock = self._control.partition(self._total - tpcs).prefill, self._scheduler.forward_stream
        stream.wait_stream(stock)
        # Prefill graphs share memory and input buffers with the decode graphs that run beside.
        graphs, self._runner.prefill_cuda_graph_runner = self._runner.prefill_cuda_graph_runner, None
        try:
            with self._in_use(stream, copy=False), self._communicators():
                yield
        finally:
            self._runner.prefill_cuda_graph_runner = graphs
            end = torch.cuda.Event()
            end.record(stream)
            stock.wait_event(end)
            self._prefill_end = end

    def _communicators(self) -> AbstractContextManager[None]:
        """What the prefill's ranks exchange, they exchange through a group of its own."""
        return nullcontext() if self._prefill_group is None else self._prefill_group.in_use()

    @contextmanager
    def _in_use(self, stream: torch.cuda.Stream, copy: bool) -> Iterator[None]:
        """Put ``stream`` in the place of the scheduler's forward stream, and the lane's copy stream in its copy's."""
        scheduler = self._scheduler
        # Stock enters the same context for each forward, so it is kept.
        context = self._contexts.get(stream.cuda_stream)
        if context is None:
            context = self._contexts[stream.cuda_stream] = torch.cuda.stream(stream)
        before = (
            scheduler.forward_stream,
            scheduler.forward_stream_ctx,
            scheduler.copy_stream,
            scheduler.copy_stream_ctx,
        )
        scheduler.forward_stream, scheduler.forward_stream_ctx = stream, context
        if copy:
            # On the shared one a later step's tokens would wait behind the prefill's.
            scheduler.copy_stream, scheduler.copy_stream_ctx = self._copy, self._copy_context
        try:
            yield
        finally:
            (
                scheduler.forward_stream,
                scheduler.forward_stream_ctx,
                scheduler.copy_stream,
                scheduler.copy_stream_ctx,
            ) = before

    def prefill_runs(self) -> bool:
        return self._prefill_end is not None and not self._prefill_end.query()

    def state(self) -> dict[str, Any]:
        return {
            "concurrent": True,
            "levels": list(self.levels),
            "capture_s": self._capture_s,
            "graphs": {str(level): {"s": one.seconds, "mib": one.mib} for level, one in self._graphs.items()},
        }


def _useful_first(levels: tuple[int, ...]) -> list[int]:
    """From the middle outwards: too few TPCs slow decode down, too many starve the prefill."""
    middle = (len(levels) - 1) / 2
    return sorted(levels, key=lambda level: abs(levels.index(level) - middle))
