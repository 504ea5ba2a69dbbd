"""An iteration on its way: what runs, and what becomes of it in a record once its times are known."""

from __future__ import annotations

import dataclasses

import numpy as np

from learner.latency import LatencyModel, Prediction
from learner.records import Iteration, StreamRecord
from learner.samples import share_of
from sglang_ext.policy.prefill import ran_as_weighed
from sglang_ext.policy.types import Decision, Situation
from sglang_ext.timing import Span


@dataclasses.dataclass(slots=True)
class Half:
    """What one stream runs: ``spans`` has one entry per decode step, one for a prefill or a mixed batch."""

    phase: str
    tpcs: int
    q: list[int]
    c: list[int]
    logits_rows: int
    spans: list[Span]


@dataclasses.dataclass(slots=True)
class Running:
    """An iteration that was launched and whose times may not be known yet."""

    time_s: float
    model: LatencyModel
    decision: Decision | None
    mode: str
    reason: str
    tbt_slo_s: float
    running: int
    waiting: int
    concurrent: bool = False
    learnable: bool = True
    after_idle: bool = False
    expected_tokens_per_s: float = 0.0  # of a window, before its mode's yield is taken into account
    foretold: Prediction | None = None  # of a single forward, where deciding has predicted that very one
    halves: list[Half] = dataclasses.field(default_factory=list)

    @property
    def known(self) -> bool:
        return all(span.known for half in self.halves for span in half.spans)

    @property
    def tokens(self) -> int:
        """Tokens of both phases that it processed."""
        return sum(sum(half.q) * len(half.spans) for half in self.halves)


def foretold(
    decision: Decision, situation: Situation, q: list[int], c: list[int], graph_tokens: tuple[int, ...]
) -> Prediction | None:
    """What deciding has predicted of a mixed batch of ``q`` new and ``c`` cached tokens, if that is what was weighed.

    Predicting it again takes the host half a millisecond; the row of logits of a prompt that goes on, which deciding
    leaves out, is worth less. The bound on a batch that is no CUDA graph holds its launch too, so that one is no use.
    """
    if decision.mode not in ("temporal", "chunked"):
        return None  # a window that could not run, and was mixed instead
    if situation.eager_launch_s and sum(q) > (graph_tokens[-1] if graph_tokens else 0):
        return None
    if not ran_as_weighed(situation, decision.prefill_tokens, q, c):
        return None
    return Prediction(*(np.array([s]) for s in (decision.predicted_s, decision.upper_s, decision.roofline_s)))


def record_of(iteration: Running, number: int, host_overhead_s: float) -> Iteration:
    """The record of an iteration whose times are known, without its candidates."""
    return Iteration(
        iteration=number,
        time_s=iteration.time_s,
        mode=iteration.mode,
        reason=iteration.reason,
        tbt_slo_s=iteration.tbt_slo_s,
        model_version=iteration.model.version,
        running=iteration.running,
        waiting=iteration.waiting,
        concurrent=iteration.concurrent,
        host_overhead_s=host_overhead_s,
        candidates=None,
        decision=iteration.decision.index if iteration.decision is not None else -1,
        streams=streams_of(iteration),
    )


def streams_of(iteration: Running) -> list[StreamRecord]:
    """What each stream ran and took, beside predictions for that very work by the model that it was decided with."""
    streams = []
    for half, prediction in zip(iteration.halves, _predictions(iteration), strict=True):
        own = slice(len(half.spans))
        streams.append(
            StreamRecord(
                phase=half.phase,
                tpcs=half.tpcs,
                q=half.q,
                c=half.c,
                logits_rows=half.logits_rows,
                step_start_s=[span.start_s - iteration.time_s for span in half.spans],
                step_end_s=[span.end_s - iteration.time_s for span in half.spans],
                predicted_s=prediction.mean_s[own].tolist(),
                upper_s=prediction.upper_s[own].tolist(),
                roofline_s=prediction.roofline_s[own].tolist(),
                launch_s=[span.launch_s for span in half.spans],
            )
        )
    return streams


def _predictions(iteration: Running) -> list[Prediction]:
    """One for each half, with as many steps as the longer one."""
    if iteration.foretold is not None:
        return [iteration.foretold]
    model, halves = iteration.model, iteration.halves
    steps = max(len(half.spans) for half in halves)
    terms = [model.terms(*_rows(half, steps), half.logits_rows, half.tpcs) for half in halves]
    if not (iteration.concurrent and len(halves) == 2):
        return [model.predict(one) for one in terms]
    return [
        model.predict(terms[index], terms[1 - index], _shares(halves[index].spans, halves[1 - index].spans, steps))
        for index in (0, 1)
    ]


def _shares(spans: list[Span], others: list[Span], steps: int) -> np.ndarray:
    """During how much of each span the other stream ran, [steps]."""
    shares, starts, ends = np.ones(steps), [other.start_s for other in others], [other.end_s for other in others]
    shares[: len(spans)] = [share_of(span.start_s, span.end_s, starts, ends) for span in spans]
    return shares


def _rows(half: Half, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(q, c) as int [steps, n]: a decode's context grows by one with each step, a prefill's stays."""
    q = np.asarray(half.q, dtype=np.int64)
    c = np.asarray(half.c, dtype=np.int64)
    grown = np.arange(steps, dtype=np.int64)[:, None] if half.phase == "decode" else np.zeros((steps, 1), np.int64)
    return np.broadcast_to(q, (steps, len(q))), c + grown
