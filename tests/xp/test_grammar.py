"""Grammars that several ranks compile at once."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

module = pytest.importorskip("sglang_ext.compat.xp_grammar")
PARAMS = {"json_schema": None, "regex": None, "ebnf": None, "structural_tag": None}


class Backend:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}
        self.futures: dict[Any, Future[Any]] = {}

    def get_cached_or_future_value(self, key: Any, reasoning: bool) -> tuple[Any, bool]:
        if key in self.cache:
            return self.cache[key], True
        assert key not in self.futures
        self.futures[key] = Future()
        return self.futures[key], False

    def set_cache(self, key: Any, grammar: Any) -> None:
        self.cache[key] = grammar


class Grammar:
    def copy(self) -> Grammar:
        return Grammar()


def grammars() -> tuple[Backend, SimpleNamespace, Any]:
    manager = SimpleNamespace(grammar_backend=Backend(), grammar_queue=[])
    return manager.grammar_backend, manager, module.Grammars(manager)


def test_what_is_compiled_is_kept_and_what_is_not_yet_is_not_waited_for() -> None:
    backend, _, own = grammars()
    for key in ("a", "b", "a"):
        own.begin(("regex", key), False)
    backend.futures["regex", "a"].set_result(Grammar())
    own.keep()
    assert list(backend.cache) == [("regex", "a")]
    own.begin(("regex", "a"), False)  # known by now
    own.keep(wait_for=("regex", "other"))
    backend.futures["regex", "b"].set_result(Grammar())
    own.keep(wait_for=("regex", "b"))
    assert set(backend.cache) == {("regex", "a"), ("regex", "b")}


def test_one_that_cannot_be_compiled_is_not_kept() -> None:
    backend, _, own = grammars()
    own.begin(("regex", "(["), False)
    backend.futures["regex", "(["].set_exception(ValueError("no regex"))
    own.keep(wait_for=("regex", "(["))
    assert not backend.cache


def test_a_server_without_grammars_compiles_none() -> None:
    _, manager, own = grammars()
    manager.grammar_backend = None
    own.begin(("regex", "a"), False)
    own.keep()


def test_the_request_that_waits_is_the_one_that_was_taken_in_last() -> None:
    _, manager, own = grammars()
    request = SimpleNamespace(rid="b")
    assert own.waits_for(request) is None
    manager.grammar_queue += [SimpleNamespace(rid="b"), SimpleNamespace(rid="a")]
    assert own.waits_for(request) is None
    manager.grammar_queue.append(last := SimpleNamespace(rid="b"))
    assert own.waits_for(request) is last


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, None),
        ({"regex": "a"}, ("regex", "a")),
        ({"json_schema": "{}"}, ("json", "{}")),
        ({"ebnf": ""}, ("ebnf", "")),
    ],
)
def test_a_grammar_has_sglangs_name(given: dict[str, str], key: Any) -> None:
    assert module.key_of(SimpleNamespace(sampling_params=SimpleNamespace(**{**PARAMS, **given}))) == key


def test_a_request_that_only_its_own_rank_refuses_gets_its_prompt_back() -> None:
    req = SimpleNamespace(to_finish=None, origin_input_ids=[1, 2, 3])
    assert not module.refused_here(req, [1, 2, 3])
    req.to_finish, req.origin_input_ids = "abort", [0]
    assert module.refused_here(req, [1, 2, 3])
    assert list(req.origin_input_ids) == [1, 2, 3]
