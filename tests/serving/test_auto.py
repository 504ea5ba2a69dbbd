"""Greedy output in auto mode, as a user serves: chunks of 256, radix cache, overlap, learner, record and metrics."""

from __future__ import annotations

import pytest

from tests.serving import exactness

pytestmark = pytest.mark.server


def test_tokens_are_stocks(server, stock):
    before = len(server.log_text())
    exactness.serve(server, "mixed", stock)
    exactness.assert_pool_empty(server, 20_000)
    assert "Traceback" not in server.log_text()[before:]
