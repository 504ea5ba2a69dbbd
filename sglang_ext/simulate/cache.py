"""KV slots and shared prefixes of a simulated server."""

from __future__ import annotations

import math
from collections import OrderedDict

from learner.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest


class Cache:
    """Slots for ``tokens`` tokens (None: as many as it takes), and the blocks of ended prompts as far as there is room.

    A request is admitted when all that it will ever hold has room, so none is ever retracted. Blocks give way to
    requests, the one not used for longest first; they are those that the trace names, so what requests share beyond
    them is not seen.
    """

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens
        self._held = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, request: TraceRequest) -> int:
        """How many of its prompt's tokens are there: whole blocks, and never the last token, which must be computed."""
        found = 0
        for block in request.block_ids:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            found += 1
        return min(found * MOONCAKE_BLOCK_TOKENS, max(request.input_tokens - 1, 0))

    @property
    def room(self) -> float:
        """How many slots no request holds."""
        return math.inf if self._tokens is None else self._tokens - self._held

    def hold(self, tokens: int) -> None:
        """Give a request so many slots, for which there is room."""
        self._held += tokens
        self._evict()

    def release(self, request: TraceRequest, tokens: int) -> None:
        """Give the slots back; the prompt's whole blocks stay."""
        self._held -= tokens
        for block in request.block_ids[: request.input_tokens // MOONCAKE_BLOCK_TOKENS]:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self._evict()

    def _evict(self) -> None:
        if self._tokens is not None:
            room = max(self._tokens - self._held, 0) // MOONCAKE_BLOCK_TOKENS
            while len(self._blocks) > room:
                self._blocks.popitem(last=False)
