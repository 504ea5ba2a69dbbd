"""One conflux server for everything that does not need flags of its own, and what stock SGLang says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.servers import Server
from tests.serving import exactness


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
    model, env = exactness.tiny_model(), exactness.STRICT
    with Server(model, backend="conflux", max_total_tokens=20_000, args=args, env=env) as running:
        yield running


@pytest.fixture(scope="session")
def stock(tmp_path_factory) -> exactness.Reference:
    own = tmp_path_factory.getbasetemp()
    # The folder of one of pytest-xdist's workers lies in that of the run.
    return exactness.stock_reference(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
