"""Decode graphs for a lane: SGLang 0.5.17's decode runner, captured on a stream of our choice.

A CUDA graph keeps the TPC mask and the priority of the stream that it was captured on, wherever it is replayed. So
decode has one set of graphs for all TPCs, at high priority, and one for each partition.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as stock
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

logger = logging.getLogger(__name__)


_listeners: list[Callable[[], None]] = []


def before_replay() -> None:
    """Called when all that a decode graph reads is prepared, and it is launched next."""
    for listener in _listeners:
        listener()


def listen(listener: Callable[[], None]) -> None:
    """Have ``listener`` called before every replay of a lane's decode graph."""
    _listeners.append(listener)


class LaneGraphRunner(DecodeCudaGraphRunner):
    """Captures on ``stream``, with an attention backend of its own.

    Everything that stock shares between its decode runners (input buffers, the logits buffer, the graphs' memory
    pool) stays shared: decode steps follow each other, whichever partition they run on. What prefill would share with
    them is separate: it runs eagerly, on tensors of its own (``SGLANG_EAGER_INPUT_NO_COPY``) and its own attention
    backend.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        stream: torch.cuda.Stream,
        side: torch.cuda.Stream | None,
        sizes: list[int] | None = None,
    ) -> None:
        backend = model_runner._get_attention_backend(init_new_workspace=True)
        replaced: dict[str, Any] = {"graph_capture": functools.partial(stock.graph_capture, stream=stream)}
        if sizes is not None:
            replaced["get_batch_sizes_to_capture"] = lambda *_: (sizes, [])
        with in_module(stock, replaced), side_streams(model_runner, side):
            super().__init__(model_runner, attn_backend=backend)
        replay = self.backend.replay

        def told(*args: Any, **kwargs: Any) -> Any:
            before_replay()
            return replay(*args, **kwargs)

        self.backend.replay = told


@contextmanager
def in_module(module: Any, values: dict[str, Any]) -> Iterator[None]:
    """Replace globals of ``module`` for a while."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def side_streams(model_runner: ModelRunner, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Put ``stream`` in the place of the second stream that layers and the KV pool fork to while they are captured.

    Stock's has no mask and no priority; what it captures would leave the partition. With None nothing is forked.
    """
    holders: list[Any] = [m for m in model_runner.model.modules() if getattr(m, "alt_stream", None) is not None]
    pool = model_runner.token_to_kv_pool
    if getattr(pool, "alt_stream", None) is not None:
        holders.append(pool)
    before = [holder.alt_stream for holder in holders]
    for holder in holders:
        holder.alt_stream = stream
    try:
        yield
    finally:
        for holder, alt in zip(holders, before, strict=True):
            holder.alt_stream = alt


@contextmanager
def decode_graphs_on(stream: torch.cuda.Stream, side: torch.cuda.Stream) -> Iterator[None]:
    """While SGLang sets itself up: have it capture its own decode graphs on ``stream``."""
    original = ModelRunner._decode_cuda_graph_runner_cls
    make = functools.partial(LaneGraphRunner, stream=stream, side=side)
    ModelRunner._decode_cuda_graph_runner_cls = lambda self: make
    try:
        yield
    finally:
        ModelRunner._decode_cuda_graph_runner_cls = original


def prefill_graph_tokens(model_runner: ModelRunner) -> tuple[int, ...]:
    """Sizes of forwards with a prefill that run as CUDA graphs, ascending; none if such graphs are off."""
    return tuple(getattr(model_runner.prefill_cuda_graph_runner, "capture_num_tokens", ()))


class Captured(NamedTuple):
    """A level's decode graphs, and what they took."""

    runner: LaneGraphRunner
    seconds: float
    mib: float


def capture_level(model_runner: ModelRunner, stream: torch.cuda.Stream, sizes: list[int], tpcs: int) -> Captured:
    """Decode graphs for batches of ``sizes`` on ``stream`` and its ``tpcs`` TPCs. Logs time and memory."""
    begin_s, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    runner = LaneGraphRunner(model_runner, stream=stream, side=None, sizes=sizes)
    torch.cuda.synchronize()
    seconds, mib = time.perf_counter() - begin_s, (free - torch.cuda.mem_get_info()[0]) / 2**20
    batches = runner.capture_bs
    logger.info("conflux: decode graphs on %d TPCs for batches of %s: %.1f s, %.0f MiB", tpcs, batches, seconds, mib)
    return Captured(runner, round(seconds, 2), round(mib, 1))
