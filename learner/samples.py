"""Timed forwards out of iteration records."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from learner.records import Iteration, StreamRecord

IntArray = npt.NDArray[np.int64]

MAX_REQUESTS = 1 << 16
MAX_TOKENS = 1 << 24
MAX_STEPS = 1 << 12
MAX_STEP_S = 600.0
# A forward that launching took for this share of its time was not slowed by the device.
HOST_BOUND = 0.9
# Requests times steps of one stream: what a record can make its reader allocate.
MAX_CELLS = 1 << 20


class Forward(NamedTuple):
    """One batch as the latency model takes it."""

    q: IntArray  # [n] new tokens per request
    c: IntArray  # [n] cached tokens per request
    logits_rows: int
    tpcs: int


class Sample(NamedTuple):
    """One timed forward: step ``step`` of stream ``stream`` of its iteration."""

    q: IntArray
    c: IntArray
    logits_rows: int
    tpcs: int
    beside: Forward | None  # what ran on the other stream during this step
    measured_s: float
    stream: int
    step: int
    share: float = 1.0  # of this step's time that it ran
    launch_s: float = 0.0  # how long launching it kept the host; 0 if not known

    @property
    def host_bound(self) -> bool:
        """Whether the device waited for the host nearly all the time: then this says how fast the host is."""
        return self.launch_s >= HOST_BOUND * self.measured_s

    @property
    def mostly_beside(self) -> bool:
        """Whether the other stream ran during at least half of the step."""
        return self.beside is not None and self.share >= 0.5


def samples_of(iteration: Iteration) -> list[Sample]:
    """Every timed step of an iteration, stream by stream.

    Step j of a look-ahead decode has c + j cached tokens. In a concurrent iteration a step's ``beside`` is the other
    stream's batch if that ran meanwhile. Timings are passed on as recorded, sound or not.
    Raises ValueError for a stream whose columns contradict each other or hold absurd counts.
    """
    forwards = [_forward_of(stream) for stream in iteration.streams]
    samples: list[Sample] = []
    for index, (stream, forward) in enumerate(zip(iteration.streams, forwards, strict=True)):
        if forward is None:
            continue
        other = _other(iteration, forwards, index)
        for step, (start, end) in enumerate(zip(stream.step_start_s, stream.step_end_s, strict=True)):
            beside, share = None, 1.0
            if other is not None:
                beside_it = iteration.streams[other]
                share = share_of(start, end, beside_it.step_start_s, beside_it.step_end_s)
                beside = forwards[other] if share > 0.0 else None
            c = forward.c + step if step else forward.c
            launch_s = stream.launch_s[step] if stream.launch_s else 0.0
            batch = forward.q, c, forward.logits_rows, forward.tpcs
            samples.append(Sample(*batch, beside, end - start, index, step, share, launch_s))
    return samples


def _forward_of(stream: StreamRecord) -> Forward | None:
    """The batch of a stream, None if it ran nothing."""
    q, c = stream.q, stream.c
    steps = len(stream.step_end_s)
    if len(q) != len(c) or steps != len(stream.step_start_s) or len(stream.launch_s) not in (0, steps):
        raise ValueError("a stream's q and c, or its steps' starts, ends and launches, differ in length")
    if len(q) > MAX_REQUESTS or steps > MAX_STEPS or len(q) * steps > MAX_CELLS:
        raise ValueError(f"a stream has {len(q)} requests and {steps} steps")
    if not q or not steps:
        return None
    if min(q) < 0 or min(c) < 0 or max(q) > MAX_TOKENS or max(c) > MAX_TOKENS:
        raise ValueError("a stream's q or c is negative or absurdly large")
    if not any(q):
        return None
    if steps > 1 and not all(new <= 1 and (cached > 0 or not new) for new, cached in zip(q, c, strict=True)):
        raise ValueError("only a decode batch can have several steps")
    if not 0 <= stream.logits_rows <= len(q) or stream.tpcs < 1:
        raise ValueError(f"a stream has {stream.logits_rows} logits rows for {len(q)} requests on {stream.tpcs} TPCs")
    return Forward(np.array(q, dtype=np.int64), np.array(c, dtype=np.int64), stream.logits_rows, stream.tpcs)


def _other(iteration: Iteration, forwards: list[Forward | None], index: int) -> int | None:
    """Index of the one other stream that ran at the same time."""
    if not iteration.concurrent:
        return None
    others = [i for i, forward in enumerate(forwards) if i != index and forward is not None]
    return others[0] if len(others) == 1 else None


def share_of(start: float, end: float, other_starts: Iterable[float], other_ends: Iterable[float]) -> float:
    """During how much of [start, end] another stream had a step running; 0 if the times make no sense."""
    if not (math.isfinite(start) and math.isfinite(end) and end > start):
        return 0.0
    steps = zip(other_starts, other_ends, strict=True)
    both_s = sum(max(0.0, min(end, other_end) - max(start, other_start)) for other_start, other_end in steps)
    return min(both_s / (end - start), 1.0)
