"""Grammars on several XP ranks, in SGLang 0.5.17: a request waits on rank 0 until its own is compiled, and is then made
anew on the rank where it will decode, which therefore compiles the same ones from the same moment on."""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.managers.schedule_batch import Req

Key = tuple[str, str]
"""What kind of grammar, and its text."""


class Grammars:
    """A rank's part."""

    def __init__(self, manager: GrammarManager) -> None:
        self._manager = manager
        self._under_way: dict[Key, Future[Any]] = {}

    def waits_for(self, request: Any) -> Req | None:
        """The request that was just taken in, if it waits for its grammar."""
        queue = self._manager.grammar_queue
        return queue[-1] if queue and queue[-1].rid == request.rid else None

    def begin(self, key: Key, reasoning: bool) -> None:
        """Compile one beside all else, unless it is known."""
        backend = self._manager.grammar_backend
        if backend is None or key in self._under_way:
            return
        found, known = backend.get_cached_or_future_value(key, reasoning)
        if not known:
            self._under_way[key] = found

    def keep(self, *, wait_for: Key | None = None) -> None:
        """Keep those that are compiled for who asks for them; the one that is waited for in any case."""
        for key, future in list(self._under_way.items()):
            if not (future.done() or key == wait_for):
                continue
            del self._under_way[key]
            # One that cannot be compiled is compiled again, and its error told, when it is asked for.
            if future.exception() is None:
                self._manager.grammar_backend.set_cache(key, future.result().copy())


def key_of(request: Any) -> Key | None:
    """What constrains a request's answer, as SGLang names it."""
    params = request.sampling_params
    for kind, text in (
        ("json", params.json_schema),
        ("regex", params.regex),
        ("ebnf", params.ebnf),
        ("structural_tag", params.structural_tag),
    ):
        if text is not None:
            return kind, text
    return None


def refused_here(req: Req, tokens: list[int]) -> bool:
    """Whether a request of an admitted prompt turned out to be none that can be served, against what rank 0 found.

    It gets its prompt back, which all ranks are about to prefill, and ends with its error at the first token.
    """
    if req.to_finish is None:
        return False
    req.origin_input_ids = array("q", tokens)
    return True
