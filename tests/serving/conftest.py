"""One conflux server for everything that does not need flags of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import Server
from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def shared_state_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("conflux-state")


@pytest.fixture(scope="session")
def record_file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records") / "shared.jsonl"


@pytest.fixture(scope="session")
def server(shared_state_dir, record_file):
    """Auto mode with metrics, a record, and a TBT target that a small machine sometimes misses."""
    args = (
        *("--conflux-state-dir", str(shared_state_dir), "--conflux-record", str(record_file)),
        *("--conflux-tbt-slo-ms", "50", "--enable-metrics", "--chunked-prefill-size", "256"),
        "--constrained-json-disable-any-whitespace",
    )
    with Server(make_tiny_model(), backend="conflux", max_total_tokens=20_000, args=args) as running:
        yield running
