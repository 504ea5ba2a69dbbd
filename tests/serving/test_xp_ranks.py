"""Four ranks serve as one, and a lost one ends it all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.serving import exactness
from tests.serving.xp import assert_nothing_left, assert_shared, rank_processes, xp_server, xp_state
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.server


def llama() -> Path:
    """Heads for four ranks."""
    return make_tiny_model(family="llama", heads=8, kv_heads=4, eos_token_ids=exactness.EOS)


def test_four_ranks_serve_what_stocks_one_does(tmp_path, tmp_path_factory) -> None:
    stock = exactness.stock_reference(tmp_path_factory.getbasetemp(), llama())
    with xp_server(4, tmp_path, "--chunked-prefill-size", "64", model=llama()) as server:
        exactness.serve(server, "mixed", stock)
        ranks = xp_state(server)
        assert_nothing_left(ranks)
        assert_shared(ranks, heads=8, kv_heads=4)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_server(tmp_path, lost: int) -> None:
    with xp_server(2, tmp_path) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        ranks = rank_processes(server)
        assert len(ranks) == 2
        stream = server.stream([9, 8, 7], max_new_tokens=3000, ignore_eos=True)
        next(stream)
        begin_s = time.monotonic()
        os.kill(ranks[lost].pid, signal.SIGKILL)
        assert server.process.wait(30) != 0
        assert time.monotonic() - begin_s < 30
        _, left = psutil.wait_procs(family, timeout=10)
        assert not left
