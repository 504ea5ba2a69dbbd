"""Greedy output is stock SGLang's, token for token, however prefill and decode share the device."""

from __future__ import annotations

import pytest

from tests.serving.exactness import SPATIAL, Case, check, stock_reference

pytestmark = pytest.mark.server

CASES = (
    Case("auto", ("--chunked-prefill-size", "256")),
    Case("spatial, chunk 64", (*SPATIAL, "--chunked-prefill-size", "64")),
    Case("random mode and steps", ("--conflux-mode", "random", "--chunked-prefill-size", "64"), ends_everywhere=True),
)


@pytest.fixture(scope="module")
def stock():
    return stock_reference(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_stocks(case, stock, tmp_path):
    check(case, stock, tmp_path)
