"""Greedy output is stock SGLang's, token for token, however prefill and decode share the device, and on any KV pool."""

from __future__ import annotations

import pytest

from tests.serving.exactness import SPATIAL, Case, check

pytestmark = pytest.mark.server

RANDOM = ("--conflux-mode", "random")
CASES = (
    Case(
        "random, small pool",
        (*RANDOM, "--chunked-prefill-size", "256", "--schedule-conservativeness", "0.05"),
        pool=1500,
        work="long outputs",
    ),
    # Whole prompts: prefills that as many steps as there may be go beside.
    Case("spatial, chunk 1024", (*SPATIAL, "--chunked-prefill-size", "1024"), ends_everywhere=True),
    Case(
        "spatial, chunk 64, no overlap, no radix cache",
        (*SPATIAL, "--chunked-prefill-size", "64", "--disable-overlap-schedule", "--disable-radix-cache"),
    ),
    Case("random, page 16", (*RANDOM, "--chunked-prefill-size", "256", "--page-size", "16")),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_stocks(case, stock, tmp_path):
    check(case, stock, tmp_path)
