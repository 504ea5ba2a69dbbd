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
from learner.decodes import Decoding
from learner.device import DeviceProfile
from learner.shape import ModelShape

FloatArray = npt.NDArray[np.float64]

ALL_REDUCE_LAUNCH_S = 3e-6

# Sums over the requests of a batch: F and B of every operator, and most columns, follow from them linearly.
# _DECODES … _CLASSIFIES are 1 where _DECODE_ROWS … _LOGITS are positive. _PREFILL_BOUND and _CAUSAL_BOUND sum
# attention's maxima request by request, in bytes: max(F · 𝓑 / Π, B); _DECODE_EXCESS what F · 𝓑 / Π exceeds B by.
_PREFILL_BOUND, _CAUSAL_BOUND, _PAIRS, _PREFILL_CONTEXT, _PREFILL_TOKENS = range(5)
_PADDED_PAIRS, _DECODE_CACHED, _DECODE_ROWS, _PREFILL_ROWS, _TOKENS, _LOGITS = range(5, 11)
_DECODES, _PREFILLS, _ACTIVE, _CLASSIFIES, _LONGEST, _DECODE_EXCESS, _ONE = range(11, 18)
_SUMS = 18
_REQUEST_SUMS = _PREFILL_ROWS + 1  # the first ones add up request by request

# The columns are computed in one array behind the operators' F / Π, one row each in the order of _OPERATOR_COLUMNS.
_OPERATOR_COLUMNS = (*LINEAR_COLUMNS, "classifier_s")
_OPERATORS = len(_OPERATOR_COLUMNS)
_ROW = {name: index + _OPERATORS for name, index in COLUMN.items()}
_FLOP_ROWS = slice(0, _ROW["compute_s"] + 1)
_BYTE_ROWS = slice(_ROW["memory_s"], _ROW["classifier_s"] + 1)
_OPERATOR_ROWS = slice(_ROW[_OPERATOR_COLUMNS[0]], _ROW[_OPERATOR_COLUMNS[-1]] + 1)
_ROOFLINE_ROWS = slice(_ROW[ROOFLINE_COLUMNS[0]], _ROW[ROOFLINE_COLUMNS[-1]] + 1)
_LOG_ROWS = slice(_OPERATORS + LOG_COLUMNS.start, _OPERATORS + LOG_COLUMNS.stop)
_ALL_REDUCE, _PARTITION, _MEMORY_WHOLE, _DEMAND, _PHASE = (
    _ROW[name] for name in ("all_reduce_s", "partition_s", "memory_whole_s", "bandwidth_demand", "phase")
)


class Roofline:
    """Roofline terms of forwards of one model on one device (one rank, when the model is split).

    Raises ValueError if the model is split and the profile has no link bandwidth.
    """

    def __init__(self, shape: ModelShape, profile: DeviceProfile) -> None:
        if shape.tp > 1 and profile.link_bandwidth <= 0.0:
            raise ValueError(f"tp={shape.tp} needs a link bandwidth, which the profile of {profile.name!r} lacks")
        self.shape = shape
        self.profile = profile
        heads = shape.heads // shape.tp
        q_width = heads * shape.head_dim
        kv_width = max(1, shape.kv_heads // shape.tp) * shape.head_dim
        self._pair_flops = shape.layers * heads * (4.0 * shape.head_dim + 2.0)
        self._query_bytes = shape.layers * 2.0 * q_width * shape.activation_bytes
        self._context_bytes = shape.layers * 2.0 * kv_width * shape.kv_bytes
        self._weights = self._columns_of_sums(q_width, kv_width)
        # By S, from 0 (as 1) to the whole: 1 / Π, 1 / 𝓑, whole / S − 1, and one pair's F · 𝓑 / Π in bytes.
        s = np.maximum(np.arange(profile.tpcs + 1.0), 1.0)
        flops, bandwidth = profile.flops_at(s), profile.bandwidth_at(s)
        pair_bytes = self._pair_flops * bandwidth / flops
        self._by_tpcs = np.stack([1.0 / flops, 1.0 / bandwidth, profile.tpcs / s - 1.0, pair_bytes])
        self._decode_computes = bool((pair_bytes > self._context_bytes).any())
        self._one = np.ones(512)

    def _columns_of_sums(self, q_width: int, kv_width: int) -> FloatArray:
        """The matrix that turns sums into FLOPs, bytes and counts: [operators + columns, _SUMS]."""
        shape, profile = self.shape, self.profile
        activation = shape.activation_bytes
        intermediate = shape.intermediate // shape.tp
        out = np.zeros((_OPERATORS + len(COLUMNS), _SUMS))
        # (d_i, d_o, times per forward, the sum that counts its rows, the indicator that it runs at all)
        operators = (
            (shape.hidden, q_width + 2 * kv_width, shape.layers, _TOKENS, _ACTIVE),
            (q_width, shape.hidden, shape.layers, _TOKENS, _ACTIVE),
            (shape.hidden, 2 * intermediate, shape.layers, _TOKENS, _ACTIVE),
            (intermediate, shape.hidden, shape.layers, _TOKENS, _ACTIVE),
            (shape.hidden, -(-shape.vocabulary // shape.tp), 1, _LOGITS, _CLASSIFIES),
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
            ("linear_compute_s", _TOKENS, out[: len(LINEAR_COLUMNS), _TOKENS].sum()),
            ("linear_read_s", _ACTIVE, out[linear, _ACTIVE].sum()),
            ("elementwise_s", _TOKENS, elementwise),
            ("attention_padded_s", _PADDED_PAIRS, self._pair_flops),
            ("attention_causal_s", _CAUSAL_BOUND, 1.0),
            ("attention_prefill_s", _PREFILL_BOUND, 1.0),
            ("attention_decode_s", _DECODE_ROWS, self._query_bytes + self._context_bytes),
            ("attention_decode_s", _DECODE_CACHED, self._context_bytes),
            ("attention_decode_s", _DECODE_EXCESS, 1.0),
            ("prefill_rows", _PREFILL_ROWS, 1.0),
            ("decode_rows", _DECODE_ROWS, 1.0),
            ("logits_rows", _LOGITS, 1.0),
            ("prefill_forward", _PREFILLS, 1.0),
            ("forward", _ACTIVE, 1.0),
            ("prefill_tokens", _PREFILL_TOKENS, 1.0),
            ("log_prefill_tokens", _PREFILL_TOKENS, 1.0),
            ("log_prefill_context", _PREFILL_CONTEXT, 1.0),
            ("log_decode_rows", _DECODE_ROWS, 1.0),
            ("log_decode_context", _DECODE_CACHED, 1.0),
            ("log_longest_context", _LONGEST, 1.0),
        )
        for name, total, weight in entries:
            out[_ROW[name], total] = weight
        out[_LOG_ROWS, _ONE] = 1.0

        compute = out[:_OPERATORS].sum(axis=0)
        compute[[_PAIRS, _DECODE_ROWS, _DECODE_CACHED]] += self._pair_flops
        memory = out[[_ROW[name] for name in (*_OPERATOR_COLUMNS, "elementwise_s")]].sum(axis=0)
        memory[_TOKENS] += self._query_bytes
        memory[[_PREFILL_CONTEXT, _DECODE_ROWS, _DECODE_CACHED]] += self._context_bytes
        out[_ROW["compute_s"]], out[_ROW["memory_s"]] = compute, memory
        out[_ROW["compute_whole_s"]] = compute / profile.flops_at(profile.tpcs)
        out[_ROW["memory_whole_s"]] = memory / profile.bandwidth_at(profile.tpcs)
        return out

    def columns(
        self,
        q: npt.ArrayLike,
        c: npt.ArrayLike,
        logits_rows: npt.ArrayLike,
        tpcs: npt.ArrayLike,
        decodes: Decoding | None = None,
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """All of :data:`COLUMNS` for m forwards as [len(COLUMNS), m]; their TPCs as [m]; their roofline as [m].

        ``q``, ``c``: new and cached tokens per request, [n] or [m, n] or broadcastable to it; rows with q == 0 are
        padding. ``logits_rows``, ``tpcs``: [m] or scalar. A row with q == 1 and c > 0 is a decode, any other a
        prefill row. ``decodes`` come on top of these requests. A forward without tokens costs nothing. Whole TPCs only;
        S is clipped to [1, whole device].
        """
        q = np.asarray(q, dtype=np.float64)
        c = np.asarray(c, dtype=np.float64)
        if q.ndim == 2 and q.shape[1:] == c.shape:
            c = c[None]
        elif q.ndim != 2 or q.shape != c.shape:
            q, c = np.broadcast_arrays(np.atleast_2d(q), np.atleast_2d(c))
        s = np.asarray(tpcs, dtype=np.float64).reshape(-1)
        logits = np.asarray(logits_rows, dtype=np.float64).reshape(-1)
        m = max(q.shape[0], s.size, logits.size) if q.shape[0] else 0
        if s.size != m:
            s = np.full(m, s[0])
        if q.shape[0] != m:
            q = np.broadcast_to(q, (m, q.shape[1]))
        per_flop, per_byte, shortfall, pair_bytes = self._by_tpcs.take(s.astype(np.intp), axis=1, mode="clip")

        sums = np.zeros((_SUMS, m))
        sums[_ONE] = 1.0
        sums[_LOGITS] = logits
        if q.shape[1]:
            self._sum_requests(q, c, pair_bytes, sums)
        if decodes is not None:
            self._sum_batch(decodes, pair_bytes, sums)
        np.add(sums[_PREFILL_TOKENS], sums[_DECODE_ROWS], out=sums[_TOKENS])
        np.minimum(sums[_DECODE_ROWS : _LOGITS + 1], 1.0, out=sums[_DECODES : _CLASSIFIES + 1])
        # Padding concerns decodes, each of c + 1 tokens, only where they share a batch with a prefill.
        sums[_PADDED_PAIRS] *= sums[_PREFILLS]
        work = self._weights @ sums
        work[_FLOP_ROWS] *= per_flop
        work[_BYTE_ROWS] *= per_byte
        np.maximum(work[:_OPERATORS], work[_OPERATOR_ROWS], out=work[_OPERATOR_ROWS])
        if self.shape.tp > 1:
            work[_ALL_REDUCE] = self._all_reduce_s(sums, per_flop)
        roofline = np.asarray(np.add.reduce(work[_ROOFLINE_ROWS], axis=0))
        np.multiply(roofline, shortfall, out=work[_PARTITION])
        demand = np.divide(work[_MEMORY_WHOLE], roofline + 1e-12, out=work[_DEMAND])
        np.minimum(demand, 1.0, out=demand)
        np.multiply(sums[_DECODES], sums[_PREFILLS] + DECODE, out=work[_PHASE])
        logs = work[_LOG_ROWS]
        np.log2(logs, out=logs)
        return work[_OPERATORS:], s, roofline

    def _sum_requests(self, q: FloatArray, c: FloatArray, pair_bytes: FloatArray, sums: FloatArray) -> None:
        """Fill ``sums`` [_SUMS, m] from q [m, n] and c [1 or m, n]; ``pair_bytes`` [m] is one pair's F · 𝓑 / Π."""
        decodes = q == 1.0
        decodes &= c > 0.0
        each = np.empty((_REQUEST_SUMS, *q.shape))
        bound, causal, pairs, context, new, padded, cached, decode, prefill = each
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
        np.multiply(pairs, pair_bytes[:, None], out=bound)
        np.add(context, c + 1.0, out=causal)
        causal *= new
        causal *= (0.5 * pair_bytes)[:, None]
        moved = self._context_bytes * context
        moved += self._query_bytes * new
        np.maximum(each[:2], moved, out=each[:2])
        ones = self._ones(q.shape[1])
        np.matmul(each.reshape(-1, ones.size), ones, out=sums[:_REQUEST_SUMS].reshape(-1))
        np.maximum.reduce(cached, axis=1, out=sums[_LONGEST])
        if self._decode_computes:
            # F and B of a decode are linear in its context; F wins only where one pair costs more than its bytes.
            over = (cached + decode) * (pair_bytes - self._context_bytes)[:, None]
            over -= self._query_bytes * decode
            sums[_DECODE_EXCESS] = np.maximum(over, 0.0) @ ones

    def _sum_batch(self, decodes: Decoding, pair_bytes: FloatArray, sums: FloatArray) -> None:
        """Add decodes that were summed before to ``sums``."""
        batch, growth = decodes
        moments = batch.moments @ growth
        sums[_PADDED_PAIRS : _DECODE_ROWS + 1] += moments[:3]
        np.maximum(sums[_LONGEST], moments[3], out=sums[_LONGEST])
        if self._decode_computes:
            # F − B = (c + grown + 1) · over − the query's bytes, which is positive from one context on.
            share, grown, _ = growth
            over = np.maximum(pair_bytes - self._context_bytes, 0.0)
            switch = np.divide(self._query_bytes, over, out=np.full_like(over, np.inf), where=over > 0.0)
            count, cached = batch.beyond(switch - 1.0 - grown)
            sums[_DECODE_EXCESS] += ((cached + count * (grown + 1.0)) * over - count * self._query_bytes) * share

    def _ones(self, size: int) -> FloatArray:
        if size > self._one.size:
            self._one = np.ones(2 * size)
        return self._one[:size]

    def _all_reduce_s(self, sums: FloatArray, per_flop: FloatArray) -> FloatArray:
        """Ring all-reduce of the attention and the FFN output of every layer, [m] in seconds."""
        ranks = self.shape.tp
        volume = sums[_TOKENS] * (self.shape.hidden * self.shape.activation_bytes)
        launch = 2.0 * (ranks - 1) * ALL_REDUCE_LAUNCH_S * sums[_ACTIVE]
        transfer = 2.0 * (ranks - 1) * volume / (ranks * self.profile.link_bandwidth)
        reduction = ranks * (ranks - 1) * volume * per_flop
        return np.asarray(2.0 * self.shape.layers * (launch + transfer + reduction))
