"""Two tensor-parallel ranks, each a process on cores of its own, decide and decode as one."""

from __future__ import annotations

import psutil
import pytest

from tests.servers import Server
from tests.serving import exactness, workload

pytestmark = pytest.mark.server

# Targets that any window meets: the policy then looks ahead as far as pays, which random mode varies.
ARGS = ("--tp", "2", "--conflux-mode", "random", "--chunked-prefill-size", "256", "--conflux-tbt-slo-ms", "2000")


def test_two_ranks_serve_what_stocks_one_does(stock, tmp_path):
    requests, expected = exactness.WORKS["mixed"][:12], stock["mixed"][:12]
    env = exactness.STRICT | {"CONFLUX_TESTING": "1"}
    args = (*ARGS, "--enable-metrics", "--conflux-state-dir", str(tmp_path))
    with Server(exactness.tiny_model(), backend="conflux", max_total_tokens=2000, args=args, env=env) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        for attempt in ("first", "second"):
            workload.assert_same(expected, workload.run(server, requests), f"{attempt} round")
        exactness.assert_pool_empty(server, 2000)
        assert "conflux_prefill_tp" in server.log_text()  # a window's prefill adds up over a group of its own
        windows = exactness.conflux_state(server)["windows"]
        assert max(map(int, windows["by_size"])) > 1
        decided = {labels["mode"]: value for labels, value in server.metrics()["conflux:decisions_total"]}
        assert decided["spatial"] + decided["reserved"] >= sum(windows["by_size"].values()) > 5
        assert decided["temporal"] > 0
        server.process.terminate()
        assert server.process.wait(60) is not None
        _, left = psutil.wait_procs(family, timeout=10)
        assert not left
        assert "Traceback" not in server.log_text()
