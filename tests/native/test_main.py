from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conflux_native.topology import Topology

pytest.importorskip("conflux_native._core", reason="the extension is not built")

from .standin import StandIn


def command(cache: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CUDA_MPS_PIPE_DIRECTORY": str(cache), **settings}
    line = [sys.executable, "-m", "conflux_native", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, env=environment)


def test_it_shows_driver_gpu_mask_and_topology(stand_in: StandIn, tmp_path: Path) -> None:
    shown = command(tmp_path, f"--driver={stand_in.path}")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "NVIDIA Stand-in: 132 SMs in 66 TPCs, compute capability 9.0, 139 GiB" in shown.stdout
    assert "at offset 0x51c of a stream (known, 1 tried in" in shown.stdout
    assert "GPCs      TPCs 0, 8, 16, 24\n" in shown.stdout
    assert "clusters  of 4 blocks fit on the TPCs 0-61\n" in shown.stdout

    again = command(tmp_path, f"--driver={stand_in.path}")
    assert "(remembered), verified" in again.stdout
    fresh = command(tmp_path, f"--driver={stand_in.path}", "--fresh")
    assert "(known, 1 tried in" in fresh.stdout


def test_its_json_holds_the_same(stand_in: StandIn, tmp_path: Path) -> None:
    shown = command(tmp_path, f"--driver={stand_in.path}", "--json")
    facts = json.loads(shown.stdout)
    assert facts["driver"] == {"path": stand_in.path, "cuda": "13.0"}
    assert facts["mask"].pop("seconds") > 0
    assert facts["mask"] == {"offset": 0x51C, "how": "known", "tried": 1}
    topology = Topology.from_json(json.dumps(facts["topology"]))
    assert topology.gpcs == Topology.recorded("h200").gpcs
    assert {size: len(topology.hosting(size)) for size in (2, 4, 8, 16)} == {2: 66, 4: 62, 8: 62, 16: 58}


def test_without_a_mask_it_says_why_and_fails(stand_in: StandIn, tmp_path: Path) -> None:
    settings = {"STAND_IN_OFFSET": "-1", "STAND_IN_CAPABILITY": "80"}
    shown = command(tmp_path, f"--driver={stand_in.path}", **settings)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "SM mask   no stream mask found on NVIDIA Stand-in" in shown.stdout
    assert "GPCs      TPCs 0, 8, 16, 24, 32, 40, 48, 56, 64\n" in shown.stdout


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_without_a_driver_it_says_so_and_fails(tmp_path: Path, form: list[str]) -> None:
    shown = command(tmp_path, f"--driver={tmp_path}/libcuda.so.1", *form)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "libcuda.so.1" in (json.loads(shown.stdout)["error"] if form else shown.stdout)
