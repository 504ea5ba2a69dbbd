"""``conflux calibrate`` and ``conflux doctor`` on a real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from learner.device import DeviceProfile
from sglang_ext.cpu.machine import has_accelerator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_accelerator(), reason="needs an NVIDIA GPU")]

CONFLUX = [sys.executable, "-c", "import sys; from sglang_ext.cli import main; sys.exit(main())"]


def test_calibrate_takes_under_two_minutes_and_writes_a_sound_profile(tmp_path: Path) -> None:
    out, figure = tmp_path / "profile.json", tmp_path / "profile.svg"
    begin = time.monotonic()
    done = subprocess.run(
        [*CONFLUX, "calibrate", "--state-dir", str(tmp_path), "--output", str(out), "--plot", str(figure)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    took_s = time.monotonic() - begin
    print(done.stdout, done.stderr, f"{took_s:.1f} s", sep="\n")
    assert done.returncode == 0, done.stderr
    assert took_s < 120
    profile = DeviceProfile.load(out)
    for points in (profile.flops, profile.bandwidth):
        assert points[-1][0] == profile.tpcs
        rates = [rate for _, rate in points]
        assert rates == sorted(rates)
        assert len(points) > 1
    assert "skipped" not in profile.provenance
    assert figure.stat().st_size > 5000


def test_serving_finds_what_was_calibrated(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CONFLUX, "calibrate", "--quick", "--state-dir", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [*CONFLUX, "doctor", "--json", "--state-dir", str(tmp_path)], capture_output=True, text=True, check=False
    )
    read = json.loads(done.stdout)
    assert read["facts"]["profile"]["source"] == "calibrated"
    assert [way["verdict"] for way in read["facts"]["ways"]] == ["passed", "passed"]
