"""The command itself, run on this machine and on one whose driver is a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cpu.machine import has_accelerator
from tests.native.conftest import stand_in, stand_in_580  # noqa: F401 (fixtures)
from tests.native.standin import StandIn

pytestmark = pytest.mark.skipif(has_accelerator(), reason="for machines without a GPU")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from sglang_ext.cli import main; sys.exit(main())", "doctor"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


def report(state_dir: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    done = run("--json", "--state-dir", str(state_dir), *arguments, **environment)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert isinstance(read, dict)
    return read


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with a PyTorch of a few lines: the real one takes seconds to import, in every child."""
    package = tmp_path_factory.mktemp("light") / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "__version__ = '9.9.9+light'\n"
        "version = SimpleNamespace(cuda=None)\n"
        "cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)\n"
        "def get_num_threads(): return 3\n"
    )
    return {"PYTHONPATH": str(package.parent)}


def test_without_a_gpu(tmp_path: Path) -> None:
    done = run("--state-dir", str(tmp_path / "state"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for part in ("this machine", "SGLang      0.5.17, supported", "on the CPU", "there is no GPU here"):
        assert part in done.stdout
    assert f"PyTorch     {version('torch')}" in done.stdout
    assert not (tmp_path / "state").exists()


def test_json_without_a_gpu(tmp_path: Path, light: dict[str, str]) -> None:
    read = report(tmp_path, **light)
    facts = read["facts"]
    assert facts["device"] == "cpu"
    assert facts["gpus"] == []
    assert facts["tested_gpu"] is None
    assert facts["torch"] == {
        "version": "9.9.9+light",
        "cuda": None,
        "sees_gpus": 0,
        "threads": 3,
        "peers": [],
        "error": None,
    }
    assert [way["verdict"] for way in facts["ways"]] == ["unavailable", "unavailable"]
    assert facts["profile"]["source"] == "none"
    assert read["serving"]["possible"] is True


def test_a_machine_that_cannot_serve_is_exit_status_1(tmp_path: Path, light: dict[str, str]) -> None:
    done = run("--state-dir", str(tmp_path), SGLANG_PLUGINS="other", **light)
    assert done.returncode == 1
    assert "SGLANG_PLUGINS=other leaves conflux out" in done.stdout


def test_without_pytorch(tmp_path: Path) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libtorch.so is not here')\n")
    done = run("--state-dir", str(tmp_path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "libtorch.so is not here" in done.stdout


def test_a_gpu_that_is_not_there(tmp_path: Path, light: dict[str, str]) -> None:
    done = run("--device", "3", "--state-dir", str(tmp_path), **light)
    assert done.returncode == 2
    assert "there is no GPU 3" in done.stderr


def test_a_driver_library_that_cannot_be_loaded(tmp_path: Path, light: dict[str, str]) -> None:
    library = tmp_path / "libcuda.so.1"
    library.write_text("no library")
    facts = report(tmp_path, CONFLUX_LIBCUDA=str(library), **light)["facts"]
    assert str(library) in facts["driver"]["error"]
    assert str(library) in facts["ways"][0]["reason"]


@pytest.fixture
def small(stand_in: StandIn, light: dict[str, str]) -> dict[str, str]:  # noqa: F811
    """Environment of a machine whose GPU has 16 TPCs, four in each of four GPCs."""
    gpcs = ";".join(",".join(str(tpc) for tpc in range(gpc, 16, 4)) for gpc in range(4))
    wanted = stand_in.environment(TPCS=16, GPCS=gpcs, NAME="Small GPU")
    settings = {name: value for name, value in wanted.items() if name.startswith("STAND_IN_")}
    return {**settings, **light, "CONFLUX_LIBCUDA": stand_in.path}


def test_with_a_driver(tmp_path: Path, small: dict[str, str]) -> None:
    facts = report(tmp_path, **small)["facts"]
    assert facts["driver"]["cuda"] == "13.0"
    (gpu,) = facts["gpus"]
    assert (gpu["name"], gpu["sms"], gpu["tpcs"], gpu["compute_capability"]) == ("Small GPU", 32, 16, "9.0")
    assert sorted(map(sorted, facts["gpcs"]["gpcs"])) == [list(range(gpc, 16, 4)) for gpc in range(4)]
    smctrl, green = facts["ways"]
    assert smctrl["verdict"] == "passed", smctrl["reason"]
    assert green["verdict"] == "passed", green["reason"]
    assert smctrl["levels"] == sorted(smctrl["levels"])
    assert smctrl["levels"]


def test_without_a_test_nothing_runs_on_the_gpu(tmp_path: Path, small: dict[str, str]) -> None:
    # A GPU on which no context can be made: opening it would show.
    facts = report(tmp_path, "--no-test", **small, STAND_IN_FAIL="cuDevicePrimaryCtxRetain=2")["facts"]
    assert [way["verdict"] for way in facts["ways"]] == ["not tested", "not tested"]
    assert facts["ways"][0]["reason"] == "offset 0x51c is known for CUDA 13.0"
    assert facts["gpcs"] is None


def test_a_gpu_that_cannot_be_opened(tmp_path: Path, small: dict[str, str]) -> None:
    facts = report(tmp_path, **small, STAND_IN_FAIL="cuDevicePrimaryCtxRetain=2")["facts"]
    assert [way["verdict"] for way in facts["ways"]] == ["failed", "failed"]
    assert "cuDevicePrimaryCtxRetain" in facts["ways"][0]["reason"]


def test_a_driver_that_crashes(tmp_path: Path, small: dict[str, str]) -> None:
    """No mask at all, and every write where one might be aborts: the doctor lives on."""
    facts = report(tmp_path, **small, STAND_IN_OFFSET="-1", STAND_IN_CRASH="0x51c")["facts"]
    smctrl, green = facts["ways"]
    assert smctrl["verdict"] == "failed"
    assert green["verdict"] == "passed", green["reason"]
