"""The attention-aware roofline of one forward, vectorised over candidates.

Per operator t = max(F / Π(S), B / 𝓑(S)), after the DuetServe article (arXiv 2511.04791, §4.1): linear layers by
their token count, attention request by request, and a ring all-reduce when the model is split. The classifier works
on the rows that get logits. Norms, activations and rope are bandwidth terms.

A candidate's times come as named columns. Some add up to ``roofline_s``, the article's form; others decompose it
differently, or count what costs time without appearing in a roofline (launches, rows), so that an estimator can find
out what this device and these kernels really do. The last ones describe the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.columns import COLUMN, COLUMNS, DECODE, LINEAR_COLUMNS, LOG_COLUMNS, ROOFLINE_COLUMNS
from learner.device import DeviceProfile
from learner.requests import (
    ACTIVE,
    CAUSAL_BOUND,
    CLASSIFIES,
    DECODE_CACHED,
    DECODE_EXCESS,
    DECODE_ROWS,
    DECODES,
    LOGITS,
    LONGEST,
    ONE,
    PADDED_PAIRS,
    PAIRS,
    PREFILL_BOUND,
    PREFILL_CONTEXT,
    PREFILL_ROWS,
    PREFILL_TOKENS,
    PREFILLS,
    REQUEST_SUMS,
    SUMS,
    TOKENS,
    Requests,
    complete,
)
from learner.shape import ModelShape

FloatArray = npt.NDArray[np.float64]

ALL_REDUCE_LAUNCH_S = 3e-6
# Of a layer with XP: to the heads, back, and to the rank that decodes.
XP_EXCHANGES = 3

# The columns are computed in one array behind the operators' F / Π, one row each in the order of _OPERATOR_COLUMNS.
_OPERATOR_COLUMNS = (*LINEAR_COLUMNS, "classifier_s")
OPERATORS = len(_OPERATOR_COLUMNS)
_ROW = {name: index + OPERATORS for name, index in COLUMN.items()}
FLOP_ROWS = slice(0, _ROW["compute_s"] + 1)
BYTE_ROWS = slice(_ROW["memory_s"], _ROW["classifier_s"] + 1)
OPERATOR_ROWS = slice(_ROW[_OPERATOR_COLUMNS[0]], _ROW[_OPERATOR_COLUMNS[-1]] + 1)
_ROOFLINE_ROWS = slice(_ROW[ROOFLINE_COLUMNS[0]], _ROW[ROOFLINE_COLUMNS[-1]] + 1)
LOG_ROWS = slice(OPERATORS + LOG_COLUMNS.start, OPERATORS + LOG_COLUMNS.stop)
PARTITION_ROWS = slice(_ROW["compute_partition_s"], _ROW["attention_decode_partition_s"] + 1)
_ALL_REDUCE, _MEMORY_WHOLE, _DEMAND, _PHASE = (
    _ROW[name] for name in ("all_reduce_s", "memory_whole_s", "bandwidth_demand", "phase")
)


class Roofline:
    """Roofline terms of forwards of one model on one device (one rank, when the model is split).

    Raises ValueError if the model is split and the profile has no link bandwidth.
    """

    def __init__(self, shape: ModelShape, profile: DeviceProfile) -> None:
        if max(shape.tp, shape.xp) > 1 and profile.link_bandwidth <= 0.0:
            ways = f"tp={shape.tp}, xp={shape.xp}"
            raise ValueError(f"{ways} needs a link bandwidth, which the profile of {profile.name!r} lacks")
        self.shape = shape
        self.profile = profile
        self.requests = Requests(shape)
        self.weights = self._columns_of_sums()
        """Turns sums into the operators' FLOPs, then :data:`COLUMNS` in FLOPs, bytes, seconds or counts: see the
        slices of its rows."""
        s = np.maximum(np.arange(profile.tpcs + 1.0), 1.0)
        flops, bandwidth = profile.flops_at(s), profile.bandwidth_at(s)
        pair_bytes = self.requests.pair_flops * bandwidth / flops
        self.by_tpcs = np.stack([1.0 / flops, 1.0 / bandwidth, profile.tpcs / s - 1.0, pair_bytes])
        """By S, from 0 (as 1) to the whole: 1 / Π, 1 / 𝓑, whole / S − 1, and one pair's F · 𝓑 / Π in bytes."""
        self.decode_computes = bool((pair_bytes > self.requests.context_bytes).any())
        """Whether there are S and contexts for which a decode's attention takes longer to compute than to read."""
        ranks = shape.tp
        self.reduction_flops = 2.0 * shape.layers * ranks * (ranks - 1) * shape.hidden * shape.activation_bytes
        """FLOPs per token that add up all-reduces; the rest of these is in ``weights``."""
        self._one = np.ones(512)

    def _columns_of_sums(self) -> FloatArray:
        shape, profile, requests = self.shape, self.profile, self.requests
        q_width, kv_width = requests.q_width, requests.kv_width
        activation = shape.activation_bytes
        intermediate = shape.intermediate // shape.tp
        out = np.zeros((OPERATORS + len(COLUMNS), SUMS))
        # (d_i, d_o, times per forward, the sum that counts its rows, the indicator that it runs at all)
        operators = (
            (shape.hidden, q_width + 2 * kv_width, shape.layers, TOKENS, ACTIVE),
            (q_width, shape.hidden, shape.layers, TOKENS, ACTIVE),
            (shape.hidden, 2 * intermediate, shape.layers, TOKENS, ACTIVE),
            (intermediate, shape.hidden, shape.layers, TOKENS, ACTIVE),
            (shape.hidden, -(-shape.vocabulary // shape.tp), 1, LOGITS, CLASSIFIES),
        )
        for index, (inputs, outputs, times, count, runs) in enumerate(operators):
            row = _ROW[_OPERATOR_COLUMNS[index]]
            out[index, count] = 2.0 * inputs * outputs * times
            out[row, count] = (inputs + outputs) * activation * times
            out[row, runs] = inputs * outputs * shape.weight_bytes * times
        norms, activations, rope = 4.0 * shape.hidden, 3.0 * intermediate, 2.0 * (q_width + kv_width)
        final_norm = 2.0 * shape.hidden
        elementwise = (shape.layers * (norms + activations + rope) + final_norm) * activation
        linear = slice(_ROW[LINEAR_COLUMNS[0]], _ROW[LINEAR_COLUMNS[-1]] + 1)
        entries = (
            ("linear_compute_s", TOKENS, out[: len(LINEAR_COLUMNS), TOKENS].sum()),
            ("linear_read_s", ACTIVE, out[linear, ACTIVE].sum()),
            ("elementwise_s", TOKENS, elementwise),
            ("attention_padded_s", PADDED_PAIRS, requests.pair_flops),
            ("attention_causal_s", CAUSAL_BOUND, 1.0),
            ("attention_prefill_s", PREFILL_BOUND, 1.0),
            ("attention_decode_s", DECODE_ROWS, requests.query_bytes + requests.context_bytes),
            ("attention_decode_s", DECODE_CACHED, requests.context_bytes),
            ("attention_decode_s", DECODE_EXCESS, 1.0),
            ("prefill_rows", PREFILL_ROWS, 1.0),
            ("decode_rows", DECODE_ROWS, 1.0),
            ("logits_rows", LOGITS, 1.0),
            ("prefill_forward", PREFILLS, 1.0),
            ("forward", ACTIVE, 1.0),
            ("prefill_tokens", PREFILL_TOKENS, 1.0),
            ("padded_tokens", TOKENS, 1.0),
            ("log_prefill_tokens", PREFILL_TOKENS, 1.0),
            ("log_prefill_context", PREFILL_CONTEXT, 1.0),
            ("log_decode_rows", DECODE_ROWS, 1.0),
            ("log_decode_context", DECODE_CACHED, 1.0),
            ("log_longest_context", LONGEST, 1.0),
        )
        for name, total, weight in entries:
            out[_ROW[name], total] = weight
        out[LOG_ROWS, ONE] = 1.0
        if shape.tp > 1:
            # A ring all-reduce of the attention and the FFN output of every layer.
            rounds = 4.0 * shape.layers * (shape.tp - 1)
            out[_ALL_REDUCE, ACTIVE] = rounds * ALL_REDUCE_LAUNCH_S
            out[_ALL_REDUCE, TOKENS] = rounds * shape.hidden * activation / (shape.tp * profile.link_bandwidth)
        if shape.xp > 1:
            # A rank's rows of a prompt: q, k and v by heads to all ranks, what attends to them back, and k and v with
            # all heads to where the prompt will decode. What is sent and what arrives are as much where rows are even.
            widths = 2.0 * (q_width + kv_width) + 2.0 * kv_width
            sent = shape.layers * (shape.xp - 1) / shape.xp * widths * activation
            out[_ALL_REDUCE, PREFILLS] += XP_EXCHANGES * shape.layers * ALL_REDUCE_LAUNCH_S
            out[_ALL_REDUCE, PREFILL_TOKENS] += sent / profile.link_bandwidth

        compute = out[:OPERATORS].sum(axis=0)
        compute[[PAIRS, DECODE_ROWS, DECODE_CACHED]] += requests.pair_flops
        memory = out[[_ROW[name] for name in (*_OPERATOR_COLUMNS, "elementwise_s")]].sum(axis=0)
        memory[TOKENS] += requests.query_bytes
        memory[[PREFILL_CONTEXT, DECODE_ROWS, DECODE_CACHED]] += requests.context_bytes
        out[_ROW["compute_s"]], out[_ROW["memory_s"]] = compute, memory
        out[_ROW["compute_whole_s"]] = compute / profile.flops_at(profile.tpcs)
        out[_ROW["memory_whole_s"]] = memory / profile.bandwidth_at(profile.tpcs)
        out[_ROW["compute_partition_s"]] = out[_ROW["compute_whole_s"]]
        out[_ROW["memory_partition_s"]] = out[_ROW["memory_whole_s"]]
        kv_bytes = out[_ROW["attention_decode_partition_s"]]
        kv_bytes[[DECODE_ROWS, DECODE_CACHED]] = requests.context_bytes / profile.bandwidth_at(profile.tpcs)
        return out

    def columns(
        self, q: npt.ArrayLike, c: npt.ArrayLike, logits_rows: npt.ArrayLike, tpcs: npt.ArrayLike
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """All of :data:`COLUMNS` for m forwards as [len(COLUMNS), m]; their TPCs as [m]; their roofline as [m].

        ``q``, ``c``: new and cached tokens per request, [n] or [m, n] or broadcastable to it; rows with q == 0 are
        padding. ``logits_rows``, ``tpcs``: [m] or scalar. A row with q == 1 and c > 0 is a decode, any other a
        prefill row. A forward without tokens costs nothing. Whole TPCs only; S is clipped to [1, whole device].
        """
        q, c = np.broadcast_arrays(
            np.atleast_2d(np.asarray(q, dtype=np.float64)), np.atleast_2d(np.asarray(c, dtype=np.float64))
        )
        s = np.asarray(tpcs, dtype=np.float64).reshape(-1)
        logits = np.asarray(logits_rows, dtype=np.float64).reshape(-1)
        m = max(q.shape[0], s.size, logits.size) if q.shape[0] else 0
        if s.size != m:
            s = np.full(m, s[0])
        if q.shape[0] != m:
            q, c = (np.broadcast_to(of, (m, of.shape[1])) for of in (q, c))
        per_flop, per_byte, shortfall, pair_bytes = self.by_tpcs.take(s.astype(np.intp), axis=1, mode="clip")

        sums = np.zeros((SUMS, m))
        sums[ONE] = 1.0
        sums[LOGITS] = logits
        if q.shape[1]:
            self._sum_requests(q, c, pair_bytes[:, None], sums)
        complete(sums)
        self.requests.pad(sums[TOKENS], sums[PREFILLS] * (s >= self.profile.tpcs))
        work = self.weights @ sums
        work[FLOP_ROWS] *= per_flop
        work[BYTE_ROWS] *= per_byte
        work[PARTITION_ROWS] *= shortfall
        np.maximum(work[:OPERATORS], work[OPERATOR_ROWS], out=work[OPERATOR_ROWS])
        work[_ALL_REDUCE] += self.reduction_flops * sums[TOKENS] * per_flop
        roofline = np.asarray(np.add.reduce(work[_ROOFLINE_ROWS], axis=0))
        demand = np.divide(work[_MEMORY_WHOLE], np.maximum(roofline, 1e-12), out=work[_DEMAND])
        np.minimum(demand, 1.0, out=demand)
        np.multiply(sums[DECODES], sums[PREFILLS] + DECODE, out=work[_PHASE])
        logs = work[LOG_ROWS]
        np.log2(logs, out=logs)
        return work[OPERATORS:], s, roofline

    def _sum_requests(self, q: FloatArray, c: FloatArray, pair_bytes: FloatArray, sums: FloatArray) -> None:
        """Fill ``sums`` [SUMS, m] from q and c [m, n]; ``pair_bytes`` [m, 1] is one pair's F · 𝓑 / Π."""
        requests = self.requests
        decodes = q == 1.0
        decodes &= c > 0.0
        each = np.zeros((REQUEST_SUMS, *q.shape))
        bound, causal, _, pairs, context, new, padded, cached, decode, prefill = each
        decode[...] = decodes
        np.greater(q, decode, out=prefill)  # a decode has q == 1, so this leaves the others with q > 0
        np.multiply(c, decode, out=cached)
        np.multiply(q, prefill, out=new)
        np.multiply(c, prefill, out=context)
        context += new
        np.add(context, cached, out=padded)
        padded += decode
        padded *= padded
        # Pairs of query and key: q (q + c); a causal mask leaves q (q + 2c + 1) / 2 of them.
        np.multiply(new, context, out=pairs)
        np.multiply(pairs, pair_bytes, out=bound)
        np.add(context, c + 1.0, out=causal)
        causal *= new
        causal *= 0.5 * pair_bytes
        moved = requests.context_bytes * context
        moved += requests.query_bytes * new
        np.maximum(each[:2], moved, out=each[:2])
        ones = self._ones(q.shape[1])
        np.matmul(each.reshape(-1, ones.size), ones, out=sums[:REQUEST_SUMS].reshape(-1))
        np.maximum.reduce(cached, axis=1, out=sums[LONGEST])
        if self.decode_computes:
            sums[DECODE_EXCESS] = requests.excess(decode, cached + decode, pair_bytes) @ ones

    def _ones(self, size: int) -> FloatArray:
        if size > self._one.size:
            self._one = np.ones(2 * size)
        return self._one[:size]
