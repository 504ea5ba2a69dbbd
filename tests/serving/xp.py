"""Servers of several XP ranks on CPUs, and what their counters have to say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from tests.servers import Server
from tests.serving import exactness

LAYERS, HEAD_DIM, BYTES = 2, 32, 4


def xp_server(ranks: int, state_dir: Path, *args: str, model: Path | None = None, pool: int = 8000) -> Server:
    return Server(
        model or exactness.tiny_model(),
        backend="conflux",
        max_total_tokens=pool,
        args=("--conflux-xp", str(ranks), "--conflux-state-dir", str(state_dir), *args),
        env={"CONFLUX_TESTING": "1"},
    )


def rank_processes(server: Server) -> list[psutil.Process]:
    """The schedulers' processes, by rank."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    ranks = [one for one in family if "scheduler" in " ".join(one.cmdline()).lower()]
    return sorted(ranks, key=lambda one: one.create_time())


def xp_state(server: Server) -> list[dict[str, Any]]:
    """What each rank has and has done, once nothing runs."""
    server.flush()
    time.sleep(2.5)  # ranks say it when the next iteration begins
    state: list[dict[str, Any]] = exactness.conflux_state(server)["xp"]["rank"]
    return state


def assert_nothing_left(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["free_slots"] == rank["slots"]
        assert rank["prompts"] == rank["decodes"] == 0


def assert_shared(ranks: list[dict[str, Any]], heads: int, kv_heads: int) -> None:
    """By the counters: every long prompt had rows everywhere, and as many bytes went as the formulas say."""
    n, tokens = len(ranks), ranks[0]["prefilled_tokens"]
    assert sum(rank["rows"] for rank in ranks) == tokens
    for rank in ranks:
        assert rank["long_prompts_with_rows"] == rank["long_prompts"] > 40
    row_bytes = LAYERS * HEAD_DIM * BYTES
    # Of q, k and v a rank keeps an Nth; of what attention makes of all rows by an Nth of the heads, its own rows.
    there, back = (heads + 2 * kv_heads) * row_bytes, heads * row_bytes
    assert sum(rank["all_to_all_bytes"] for rank in ranks) * n == tokens * (n - 1) * (there + back)
    migrated = sum(rank["migrated_bytes"] for rank in ranks)
    assert migrated == ranks[0]["migrating_tokens"] * 2 * kv_heads * row_bytes
    assert 0 < ranks[0]["migrating_tokens"] < tokens
