"""What an iteration costs the host: sums become times per forward, and the parts are where they are looked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.host_time import per_forward

ROOT = Path(__file__).resolve().parents[2]
RUN = """
from learner.device import DeviceProfile
from learner.latency import LatencyModel
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang_ext.compat.scheduler import ConfluxScheduler
from sglang_ext.controller import Controller
from tests.learner.test_latency import LARGE, H200
assert all(hasattr(of, "__wrapped__") for of in (ConfluxScheduler.begin, Controller.decide, Controller.poll))
model = LatencyModel(LARGE, H200)
for _ in range(3):
    model.with_snapshot(None)
worker = object.__new__(TpModelWorker)
for _ in range(40):
    try:
        worker.forward_batch_generation(None)
    except Exception:
        pass
"""


def test_parts_are_per_forward_of_the_second_half() -> None:
    def sums(forwards: int) -> dict:
        # The first twenty forwards are slow; then each takes 10 ms of 16, and results 2 (3 of wall time).
        slow = 5.0 * min(forwards, 20)
        return {
            "total": [forwards, slow + 0.016 * forwards, slow + 0.020 * forwards],
            "forward": [forwards, slow + 0.010 * forwards, slow + 0.011 * forwards],
            "results": [forwards, 0.002 * forwards, 0.003 * forwards],
        }

    found = per_forward([sums(forwards) for forwards in range(20, 220, 20)])
    assert found["forwards"] == 60
    assert found["parts"]["results"] == {"cpu_ms": pytest.approx(2.0), "wall_ms": pytest.approx(3.0)}
    assert found["parts"]["all but forward and waiting"] == {
        "cpu_ms": pytest.approx(6.0),
        "wall_ms": pytest.approx(9.0),
    }
    with pytest.raises(ValueError, match="too few forwards"):
        per_forward([sums(20)])


def test_the_parts_are_timed_in_a_process_that_finds_the_folder(tmp_path: Path) -> None:
    paths = [str(ROOT / "bench" / "host_parts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    sums = tmp_path / "parts.jsonl"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CONFLUX_HOST_PARTS": str(sums)}
    subprocess.run([sys.executable, "-c", RUN], env=env, check=True, timeout=120)
    lines = [json.loads(line) for line in sums.read_text().splitlines()]
    assert [line["forward"][0] for line in lines] == [20, 40]
    assert lines[-1]["conflux: taking in: snapshot"][0] == 3
