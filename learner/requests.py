"""What a forward's requests add up to: F and B of every operator, and most columns, follow from these sums linearly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.shape import ModelShape

FloatArray = npt.NDArray[np.float64]

# DECODES … CLASSIFIES are 1 where DECODE_ROWS … LOGITS are positive. PREFILL_BOUND and CAUSAL_BOUND sum attention's
# maxima request by request, in bytes: max(F · 𝓑 / Π, B); DECODE_EXCESS what F · 𝓑 / Π exceeds B by. SQUARES are of new
# tokens; TOKENS are those that linear layers work on, padding included.
PREFILL_BOUND, CAUSAL_BOUND, SQUARES, PAIRS, PREFILL_CONTEXT, PREFILL_TOKENS = range(6)
PADDED_PAIRS, DECODE_CACHED, DECODE_ROWS, PREFILL_ROWS, TOKENS, LOGITS = range(6, 12)
DECODES, PREFILLS, ACTIVE, CLASSIFIES, LONGEST, DECODE_EXCESS, ONE = range(12, 19)
SUMS = 19
REQUEST_SUMS = PREFILL_ROWS + 1  # the first ones add up request by request


class Requests:
    """Sums over requests to one model (one rank, when it is split)."""

    def __init__(self, shape: ModelShape) -> None:
        heads = shape.heads // shape.tp
        self.q_width = heads * shape.head_dim
        self.kv_width = max(1, shape.kv_heads // shape.tp) * shape.head_dim
        self.pair_flops = shape.layers * heads * (4.0 * shape.head_dim + 2.0)
        self.query_bytes = shape.layers * 2.0 * self.q_width * shape.activation_bytes
        self.context_bytes = shape.layers * 2.0 * self.kv_width * shape.kv_bytes
        self._graphs = np.array(shape.graph_tokens, dtype=np.float64)

    def bytes_of(self, pair_bytes: FloatArray) -> FloatArray:
        """What turns SQUARES to PREFILL_TOKENS of a request into PREFILL_BOUND and CAUSAL_BOUND: first the bytes that
        computing takes as long as, then the bytes to move; [2, 2 · s, 4], two rows for each of ``pair_bytes`` [s].

        These are one pair's F · 𝓑 / Π in bytes. There are q (q + c) pairs of query and key; a causal mask leaves
        q (q + 2c + 1) / 2 of them.
        """
        squares, pairs, context, tokens = range(4)
        out = np.zeros((2, 2 * len(pair_bytes), 4))
        out[0, :, pairs] = pair_bytes.repeat(2)
        out[0, 1::2, tokens] = 0.5 * pair_bytes
        out[0, 1::2, squares] = -0.5 * pair_bytes
        out[1, :, context], out[1, :, tokens] = self.context_bytes, self.query_bytes
        return out

    def pad(self, tokens: FloatArray, prefills: FloatArray) -> None:
        """Round ``tokens`` [m] up to the next CUDA graph, in place, where ``prefills`` [m] is 1, not 0; beyond the
        largest nothing is padded. Forwards that share the device run without such graphs and must be left out."""
        if not len(self._graphs):
            return
        padded = self._graphs.take(self._graphs.searchsorted(tokens), mode="clip")
        np.maximum(tokens, padded * prefills, out=tokens)

    def excess(self, rows: FloatArray | float, tokens: FloatArray, pair_bytes: FloatArray) -> FloatArray:
        """What decodes' F · 𝓑 / Π exceeds their B by, in bytes; arguments broadcast.

        F and B are linear in a decode's context: F wins only where one pair costs more than the bytes of one token.
        ``rows``: 1 for a decode, else 0; ``tokens``: its context with the new token.
        """
        return np.maximum(tokens * (pair_bytes - self.context_bytes) - self.query_bytes * rows, 0.0)


def complete(sums: FloatArray) -> None:
    """Fill in what follows from the other sums [SUMS, m], all but padding."""
    np.add(sums[PREFILL_TOKENS], sums[DECODE_ROWS], out=sums[TOKENS])
    np.minimum(sums[DECODE_ROWS : LOGITS + 1], 1.0, out=sums[DECODES : CLASSIFIES + 1])
    # Padding concerns decodes, each of c + 1 tokens, only where they share a batch with a prefill.
    sums[PADDED_PAIRS] *= sums[PREFILLS]
