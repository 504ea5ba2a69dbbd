"""One iteration over several ranks (XP): how much prefill, in which pieces, and where new decodes live.

ConfluxServe's rules. The linear layers of a prompt's chunk run where its pieces lie, so pieces are cut to level the
ranks' predicted times; attention is divided by heads, evenly, whatever the pieces. A decode lives on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_ext.policy.gaps import within
from sglang_ext.policy.placement import place_decode
from sglang_ext.policy.types import FloatArray, IntArray, Model
from sglang_ext.policy.waterfill import Curves, largest_prefill, water_fill

KNOTS = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Shares of a rank for which times are predicted; between two of them they are taken as linear."""

ROWS_APIECE = 2
"""A chunk of at least this many tokens for each rank gives every rank a row, and a prompt that is longer begins with no
smaller one: so each has a row at every long prompt."""


class RankLoad(NamedTuple):
    """What a rank has. ``decode_context`` [n]: tokens of its decodes; KV slots: ``free_slots`` of ``slots``."""

    decode_context: IntArray
    free_slots: int
    slots: int


class Waiting(NamedTuple):
    """A prompt of ``tokens`` tokens of which ``done`` are in the KV cache; its decode lives on rank ``owner``."""

    tokens: int
    done: int
    owner: int


class Chunk(NamedTuple):
    """The next tokens of one waiting prompt, from ``start`` on: ``pieces`` [ranks] of them, the owner's last."""

    prompt: int
    start: int
    pieces: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.start + sum(self.pieces)


def piece_order(owner: int, ranks: int) -> list[int]:
    """Ranks in the order of their pieces: the owner comes last, for the last row gives the first token."""
    return [*(rank for rank in range(ranks) if rank != owner), owner]


def shard_slots(tokens: int, ranks: int) -> int:
    """KV slots that ``tokens`` tokens take on each rank while they are sharded by heads."""
    return -(-tokens // ranks)


def place(tokens: int, reserve: int, loads: Sequence[RankLoad]) -> int | None:
    """The rank on which a prompt of ``tokens`` tokens shall decode, with room for ``reserve`` more; None: not now.

    Until its prefill has ended it is sharded over all ranks besides.
    """
    shard = shard_slots(tokens, len(loads))
    if any(load.free_slots < shard for load in loads):
        return None
    return place_decode(
        tokens + reserve + shard,
        np.array([load.decode_context.sum() for load in loads], dtype=np.int64),
        np.array([load.slots - load.free_slots for load in loads], dtype=np.int64),
        np.array([load.slots for load in loads], dtype=np.int64),
    )


def times(model: Model, loads: Sequence[RankLoad], cached: int, most: int) -> tuple[FloatArray, FloatArray, IntArray]:
    """Mean and bound of an iteration of each rank [ranks, m] for shares [m] of the prefill.

    See :func:`as_one_request`: here all ranks' shares are taken to be alike.
    """
    knots = np.array(sorted({*(knot for knot in KNOTS if knot < most), most}), dtype=np.int64)
    ranks, m = len(loads), len(knots)
    decodes = [len(load.decode_context) for load in loads]
    # One row for each rank and share; a rank with fewer decodes than another has rows of nothing.
    q = np.zeros((ranks, m, 1 + max(decodes)), dtype=np.int64)
    c = np.zeros_like(q)
    q[:, :, 0], c[:, :, 0] = knots, cached + (ranks - 1) * knots
    for rank, load in enumerate(loads):
        q[rank, :, 1 : 1 + decodes[rank]], c[rank, :, 1 : 1 + decodes[rank]] = 1, load.decode_context
    rows = np.repeat(np.array(decodes, dtype=np.float64), m)
    predicted = model.predict(model.terms(q.reshape(ranks * m, -1), c.reshape(ranks * m, -1), rows, model.total_tpcs))
    mean_s, upper_s = predicted.mean_s.reshape(ranks, m), predicted.upper_s.reshape(ranks, m)
    # Times never fall with the share, or there would be no level.
    return np.maximum.accumulate(mean_s, axis=1), np.maximum.accumulate(upper_s, axis=1), knots


def as_one_request(start: int, tokens: int, piece: int, ranks: int) -> int:
    """Cached tokens with which a request of ``piece`` new ones is as much attention as a rank's part of a chunk.

    A rank attends to all pairs of a chunk of ``tokens`` behind ``start`` others by an Nth of the heads: as much as all
    heads attend to an Nth of the pairs, tokens · (start + tokens) / N = piece · (cached + piece), and no more than the
    context. Its linear layers work on its piece.
    """
    if not piece:
        return 0
    return min(max(round(tokens * (start + tokens) / (ranks * piece)) - piece, 0), start + tokens)


def spread(
    waiting: Sequence[Waiting],
    loads: Sequence[RankLoad],
    model: Model,
    *,
    tbt_slo_s: float,
    budget: int,
    least: int,
    overhead_s: float = 0.0,
) -> list[Chunk]:
    """The chunks of the next iteration, at most ``budget`` tokens in the order of ``waiting``.

    While something decodes, no more than keeps every rank's bound within the target, but ``least`` tokens in any case,
    so that prefill does not starve. Without waiting prompts there are none.
    """
    left = sum(prompt.tokens - prompt.done for prompt in waiting)
    most = min(left, budget)
    if most <= 0:
        return []
    mean_s, upper_s, knots = times(model, loads, waiting[0].done, most)
    tokens = np.broadcast_to(knots.astype(np.float64), mean_s.shape)
    if any(len(load.decode_context) for load in loads):
        limit_s = within(tbt_slo_s) - overhead_s
        most = min(max(largest_prefill(Curves(tokens, upper_s), limit_s, most), least), most)
    shares = water_fill(Curves(tokens, mean_s), most)
    return cut(waiting, shares)


def cut(waiting: Sequence[Waiting], shares: IntArray) -> list[Chunk]:
    """Chunks of all shares' tokens [ranks], each divided about as they are.

    Every rank gets a row of every chunk that is long enough for that, and a chunk that ends its prompt has one on the
    owner; otherwise no rank is more than a few tokens off its share. What is left behind other chunks is not taken if
    it is too little to begin the next prompt with.
    """
    ranks, total = len(shares), int(shares.sum())
    rows_for_all = ROWS_APIECE * ranks
    chunks: list[Chunk] = []
    taken = 0
    given = np.zeros(ranks, dtype=np.int64)
    for index, prompt in enumerate(waiting):
        count = min(prompt.tokens - prompt.done, total - taken)
        if count <= 0 or (chunks and not prompt.done and count < min(prompt.tokens, rows_for_all)):
            break
        taken += count
        # What each rank should have had by the end of this chunk, less what it has had.
        due = np.maximum(shares * (taken / total) - given, 0.0)
        least = np.zeros(ranks, dtype=np.int64)
        if count >= rows_for_all:
            least[:] = 1
        elif prompt.done + count == prompt.tokens:
            least[prompt.owner] = 1
        pieces = _divide(count, due, least)
        given += pieces
        chunks.append(Chunk(index, prompt.done, tuple(pieces.tolist())))
    return chunks


def _divide(count: int, due: FloatArray, least: IntArray) -> IntArray:
    """``count`` tokens in whole numbers, in proportion to ``due`` but no less than ``least``."""
    free = count - int(least.sum())
    weight = np.maximum(due - least, 0.0)
    if weight.sum() <= 0.0:
        weight = np.ones_like(due)
    exact = free * weight / weight.sum()
    parts: IntArray = np.floor(exact).astype(np.int64)
    for rank in np.argsort(parts - exact, kind="stable")[: free - int(parts.sum())]:
        parts[rank] += 1
    return parts + least
