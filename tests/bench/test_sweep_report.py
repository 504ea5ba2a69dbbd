from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cpu import ROOT
from bench.sweep_report import goodput, goodput_table

MS = ("p99_itl_ms", "max_itl_ms", "mean_ttft_ms", "p99_ttft_ms", "request_throughput")


def point(system: str, rate: float, attained: float, target: float = 0.0) -> dict:
    return {
        "system": system,
        "rate": rate,
        "tbt_slo_ms": target,
        "model": "tiny",
        "trace": "made",
        "completed": 300,
        "failed": 0,
        "strict": {"50": attained},
        "deadlines": {"50": 1.0},
        **dict.fromkeys(MS, 10.0 * rate),
    }


@pytest.mark.parametrize(
    ("attained", "expected"),
    [
        ([1.0, 0.97, 0.93, 0.5], (5.0, "=")),
        ([1.0, 0.99, 0.95, 0.0], (6.0, "=")),
        ([1.0, 1.0, 1.0, 0.95], (8.0, "≥")),
        ([0.94, 1.0, 1.0, 1.0], (2.0, "<")),
        ([1.0, 0.9, 1.0, 1.0], (3.0, "=")),  # what comes after does not count
    ],
)
def test_goodput_is_where_attainment_falls_below_what_is_asked(attained, expected) -> None:
    points = [point("stock", rate, share) for rate, share in zip((8, 6, 4, 2), attained[::-1], strict=True)]
    rate, sign = goodput(points, "strict", "50")
    assert (pytest.approx(rate), sign) == expected


def test_a_conflux_run_counts_for_its_own_target_only() -> None:
    points = [point("conflux-auto", 2.0, 1.0, 50.0), point("conflux-auto", 4.0, 1.0, 25.0), point("stock", 2.0, 0.5)]
    head, _, conflux, stock = goodput_table(points).splitlines()
    assert head == "| goodput, requests/s | strict, 50 ms | deadlines, 50 ms |"
    assert conflux == "| conflux-auto | ≥ 2.00 | ≥ 2.00 |"
    assert stock == "| stock | < 2.00 | ≥ 2.00 |"


def test_a_report_of_tables_and_pictures(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.json"
    points = [point(system, rate, 1.1 - 0.1 * rate) for system in ("stock", "other") for rate in (1.0, 2.0, 3.0)]
    sweep.write_text(json.dumps({"points": points}))
    command = [sys.executable, "-m", "bench.sweep_report", str(sweep), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "sweep.md").read_text()
    assert "## tiny, made" in text
    assert "| stock | – | 3 | 300 |" in text
    assert "<svg" in (tmp_path / "out" / "tiny-made.svg").read_text()
    sweep.write_text(json.dumps({"points": []}))
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).returncode == 1
