"""Systems to serve a trace with: conflux in each mode, and what it is compared with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from learner.latency import LatencyModel
from sglang_ext.config import MODES
from sglang_ext.policy.decide import decide
from sglang_ext.policy.explore import Explorer
from sglang_ext.policy.queue import order_queue, prefill_alone_s
from sglang_ext.policy.types import FloatArray, IntArray, Settings, Situation
from sglang_ext.sm.levels import geometric_levels

STOCK_CHUNK = 8192
"""SGLang's ``--chunked-prefill-size`` on a GPU of 80 GB and more, which is also the most that conflux takes at once."""

DEFAULT = ("stock", "stock-chunk-2048", "stock-mixed-512", "stock-mixed-2048", "conflux-duet", "conflux-auto")
LOOK_AHEAD = 64
LEAST_CHUNK = 32


class Step(NamedTuple):
    """What one iteration runs: ``prefill_tokens`` at most, 0 for decode alone; ``steps`` decode steps beside them, in
    the same batch (1, ``window`` false), in a window, or none. ``promised_tokens_per_s``: what was predicted of a
    window, if that is to be learnt from."""

    prefill_tokens: int
    steps: int
    window: bool = False
    prefill_tpcs: int = 0
    decode_tpcs: int = 0
    promised_tokens_per_s: float = 0.0


class System(Protocol):
    """Decides iterations. ``order``: in which order waiting requests are admitted."""

    chunk: int

    def order(self, now_s: float, arrival_s: FloatArray, new: IntArray, cached: IntArray) -> IntArray: ...
    def step(self, situation: Situation) -> Step: ...


class _FirstCome:
    def order(self, now_s: float, arrival_s: FloatArray, new: IntArray, cached: IntArray) -> IntArray:
        return np.arange(len(arrival_s))


@dataclass
class PrefillFirst(_FirstCome):
    """Stock SGLang: while anything waits it is prefilled, up to ``chunk`` tokens at a time, and decodes stand still."""

    chunk: int = STOCK_CHUNK

    def step(self, situation: Situation) -> Step:
        return Step(self.chunk, 0)


@dataclass
class MixedChunk(_FirstCome):
    """``--enable-mixed-chunk``, Sarathi-Serve's way: decodes and prefill share a batch of ``chunk`` tokens."""

    chunk: int

    def step(self, situation: Situation) -> Step:
        decodes = len(situation.decode_context)
        return Step(max(self.chunk - decodes, 1), min(decodes, 1))


class Conflux:
    """The real policy with ``model`` as what was learnt."""

    chunk = STOCK_CHUNK

    def __init__(self, mode: str, model: LatencyModel, ttft_slo_s: float) -> None:
        total = model.total_tpcs
        levels = geometric_levels(total, 4, 8, lambda tpcs: True) if total > 8 else ()
        self._model, self._ttft_slo_s = model, ttft_slo_s
        self._settings = Settings(
            mode=mode,  # type: ignore[arg-type]
            concurrent=bool(levels),
            levels=levels,
            max_look_ahead=LOOK_AHEAD,
            least_chunk=LEAST_CHUNK,
            graph_tokens=model.shape.graph_tokens,
        )
        self._explorer = Explorer() if mode == "auto" else None

    def order(self, now_s: float, arrival_s: FloatArray, new: IntArray, cached: IntArray) -> IntArray:
        return order_queue(now_s, arrival_s, self._ttft_slo_s, new, prefill_alone_s(self._model, new, cached))

    def step(self, situation: Situation) -> Step:
        d = decide(situation, self._settings, self._model, self._explorer)
        window, promised = d.mode in ("spatial", "reserved"), 0.0
        if window and self._settings.mode != "duet":
            promised = d.candidates.plan(d.index).tokens_per_s / situation.window_yield
        return Step(d.prefill_tokens, d.look_ahead_steps, window, d.prefill_tpcs, d.decode_tpcs, promised)


_KINDS: Sequence[tuple[str, Callable[[str, LatencyModel, float], System]]] = (
    (r"stock", lambda size, model, ttft_slo_s: PrefillFirst()),
    (r"stock-chunk-(\d+)", lambda size, model, ttft_slo_s: PrefillFirst(_positive(size))),
    (r"stock-mixed-(\d+)", lambda size, model, ttft_slo_s: MixedChunk(_positive(size))),
    (rf"conflux-({'|'.join(MODES)})", Conflux),
)


def system(name: str, model: LatencyModel, ttft_slo_s: float) -> System:
    """``stock``, ``stock-chunk-N``, ``stock-mixed-N`` or ``conflux-MODE``. Raises ValueError for any other name."""
    for pattern, make in _KINDS:
        found = re.fullmatch(pattern, name)
        if found:
            return make(found[1] if found.groups() else "", model, ttft_slo_s)
    raise ValueError(
        f"unknown system {name!r}: stock, stock-chunk-TOKENS, stock-mixed-TOKENS, or conflux- and one of "
        f"{', '.join(MODES)}"
    )


def _positive(size: str) -> int:
    tokens = int(size)
    if not tokens:
        raise ValueError("a chunk must have at least one token")
    return tokens
