"""Greedy output is stock SGLang's, token for token, whatever the KV pool, its pages and the overlap."""

from __future__ import annotations

import pytest

from tests.serving.exactness import SPATIAL, Case, check, stock_reference

pytestmark = pytest.mark.server

CASES = (
    Case("page 16", (*SPATIAL, "--chunked-prefill-size", "256", "--page-size", "16")),
    Case(
        "no overlap, no radix cache",
        (*SPATIAL, "--chunked-prefill-size", "256", "--disable-overlap-schedule", "--disable-radix-cache"),
    ),
    Case(
        "small pool",
        ("--conflux-mode", "random", "--chunked-prefill-size", "256", "--schedule-conservativeness", "0.05"),
        pool=1500,
        longest=300,
        most_new=160,
    ),
)


@pytest.fixture(scope="module")
def stock():
    return stock_reference(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_stocks(case, stock, tmp_path):
    check(case, stock, tmp_path)
