"""What rank 0 tells the others in every iteration, and what they tell it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_ext.policy.types import IntArray


@dataclass(slots=True)
class Admission:
    """A prompt whose prefill begins: its ``tokens``, and the rank ``owner`` on which it will decode.

    ``request`` is SGLang's message, from which the owner makes its request; None where the owner has it already,
    because it was retracted there. ``arrival_s``: when it came, on the clock that all ranks share.
    """

    rid: str
    owner: int
    tokens: list[int]
    request: Any
    arrival_s: float = 0.0


@dataclass(slots=True)
class Piecework:
    """A chunk of an admitted prompt: tokens from ``start`` on, ``pieces`` [ranks] of them for each rank, the owner's
    the last."""

    rid: str
    start: int
    pieces: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + sum(self.pieces)


@dataclass(slots=True)
class Plan:
    """One iteration, the same for all ranks.

    ``aborted``: beginnings of the names of requests to end, wherever they are ("" ends all). ``shared``: SGLang's
    messages for every rank (a pause, new weights), which rank 0 has followed already. ``grammars``: what requests that
    came are constrained by, for every rank to compile (kind and text, and whether they reason). ``stop`` ends the
    server.
    """

    shared: list[Any] = field(default_factory=list)
    grammars: list[tuple[tuple[str, str], bool]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    chunks: list[Piecework] = field(default_factory=list)
    stop: bool = False


@dataclass(slots=True)
class Retracted:
    """A decode that had to give up its KV cache: its prompt is now ``tokens``."""

    rid: str
    tokens: list[int]


@dataclass(slots=True)
class Status:
    """What a rank has before an iteration. ``decode_context`` [n]: tokens of its decodes; ``tbt_slo_s``: the smallest
    target of theirs; the rest counts since the last status or, bytes and rows, since the start."""

    decode_context: IntArray
    tbt_slo_s: float
    free_slots: int
    slots: int
    free_rows: int
    retracted: list[Retracted] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
