"""The sweep's quick mode: real servers, stock and conflux, over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.cpu import ROOT
from bench.sweep import QUICK, quick_trace


def sweep(output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.sweep", "--quick", "--output", str(output), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)


def test_the_whole_way_in_small_and_once(tmp_path: Path) -> None:
    output, few = tmp_path / "sweep.json", ("--systems", "stock", "conflux-auto", "--rates", "8", "--requests", "6")
    done = sweep(output, *few, "--logs", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    stock, conflux = report["points"]
    assert (stock["system"], stock["tbt_slo_ms"]) == ("stock", 0.0)
    assert (conflux["system"], conflux["tbt_slo_ms"]) == ("conflux-auto", 100.0)
    for point in (stock, conflux):
        assert (point["completed"], point["failed"], point["model"]) == (6, 0, "tiny")
        # Both were sent the same requests.
        assert point["total_input_tokens"] == sum(request.input_tokens for request in quick_trace(6))
        assert point["total_output_tokens"] == sum(request.output_tokens for request in quick_trace(6))
        assert 0.0 < point["p50_itl_ms"] <= point["p99_itl_ms"] <= point["max_itl_ms"]
    assert sum(conflux["state"]["decisions"].values()) > 6
    # What is there is not measured again.
    before = output.read_text()
    again = sweep(output, *few, "--logs", str(tmp_path / "no server starts"))
    assert (again.returncode, output.read_text()) == (0, before)
    assert not (tmp_path / "no server starts").exists()


def test_a_sweep_needs_something_to_send(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.sweep", "--output", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--trace and --rates are needed, or --quick" in done.stderr


def test_quick_requests_fit_the_tiny_model() -> None:
    trace = quick_trace(QUICK["requests"])
    assert max(request.input_tokens + request.output_tokens for request in trace) < 4096
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
