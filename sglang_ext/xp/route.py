"""Which rows of a batch go where: numbers only, the same rules on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_ext.policy.spread import piece_order
from sglang_ext.policy.types import IntArray


class Cut(NamedTuple):
    """A chunk to be routed: tokens from ``start`` on, ``pieces`` [ranks], and the rank ``owner`` that will decode."""

    start: int
    pieces: tuple[int, ...]
    owner: int

    @property
    def tokens(self) -> int:
        return sum(self.pieces)


class Part(NamedTuple):
    """Tokens ``start`` to ``end`` of the prompt of one chunk."""

    chunk: int
    start: int
    end: int


class Route(NamedTuple):
    """One rank's view of a batch of chunks.

    ``own``: its pieces, in the order of its rows. ``piece_of`` [ranks]: rows of every rank. ``order`` [T]: arrived
    rows, which come by rank, in the order of the chunks' tokens; ``back`` is its inverse. ``leaving``: rows to migrate,
    by the rank that owns their prompt, ``leaving_to`` [ranks] of them. ``arriving``: what migrates to this rank, in the
    order in which it comes, ``arriving_from`` [ranks] rows of each. ``staying``: rows whose prompts decode here, which
    are ``staying_parts``.
    """

    own: list[Part]
    piece_of: list[int]
    order: IntArray
    back: IntArray
    leaving: IntArray
    leaving_to: list[int]
    arriving: list[Part]
    arriving_from: list[int]
    staying: IntArray
    staying_parts: list[Part]


def route(chunks: Sequence[Cut], rank: int, ranks: int) -> Route:
    """The rows of ``chunks`` as ``rank`` of ``ranks`` sees them."""
    piece_of = [sum(chunk.pieces[other] for chunk in chunks) for other in range(ranks)]
    # Where the next piece of each rank begins among all rows that arrive.
    arrives = [sum(piece_of[:other]) for other in range(ranks)]
    order, own, row = [], [], 0
    leaving: list[list[IntArray]] = [[] for _ in range(ranks)]
    arriving: list[list[Part]] = [[] for _ in range(ranks)]
    for index, chunk in enumerate(chunks):
        start = chunk.start
        for other in piece_order(chunk.owner, ranks):
            part = Part(index, start, start + chunk.pieces[other])
            count = part.end - part.start
            if not count:
                continue
            order.append(np.arange(arrives[other], arrives[other] + count))
            arrives[other] += count
            start = part.end
            if other == rank:
                own.append(part)
                leaving[chunk.owner].append(np.arange(row, row + count))
                row += count
            if chunk.owner == rank:
                arriving[other].append(part)
    staying, leaving[rank] = leaving[rank], []
    staying_parts, arriving[rank] = arriving[rank], []
    whole = _joined(order)
    back = np.empty_like(whole)
    back[whole] = np.arange(len(whole))
    return Route(
        own=own,
        piece_of=piece_of,
        order=whole,
        back=back,
        leaving=_joined([rows for to in leaving for rows in to]),
        leaving_to=[sum(map(len, to)) for to in leaving],
        arriving=[part for parts in arriving for part in parts],
        arriving_from=[sum(part.end - part.start for part in parts) for parts in arriving],
        staying=_joined(staying),
        staying_parts=staying_parts,
    )


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
