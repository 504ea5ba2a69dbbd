"""``conflux calibrate`` on a CPU, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.device import DeviceProfile
from sglang_ext import cpu
from sglang_ext.calibrate import command
from sglang_ext.calibrate.curve import Timed
from sglang_ext.calibrate.plot import draw
from sglang_ext.cpu.machine import has_accelerator
from sglang_ext.device import find_profile

on_cpu = pytest.mark.skipif(has_accelerator(), reason="for machines without a GPU")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that serves on a CPU, without what that leaves in the environment."""
    monkeypatch.setattr(cpu, "prepare", lambda: True)


@on_cpu
def test_a_cpu_is_measured_and_servers_find_it(tmp_path: Path) -> None:
    program = "import sys; from sglang_ext.cli import main; sys.exit(main())"
    arguments = ["calibrate", "--dtype", "float32", "--state-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "devices").glob("*.json")
    name = DeviceProfile.load(path).name
    assert name.endswith(" float32")
    found = find_profile(name, 1, tmp_path)
    assert found is not None
    assert (found.source, found.origin) == ("calibrated", str(path))
    assert found.profile.tpcs == len(found.profile.flops) == len(found.profile.bandwidth) == 1
    assert "The CPU serves here" in done.stdout
    assert str(path) in done.stdout
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


@on_cpu
@pytest.mark.usefixtures("prepared")
def test_output_and_plot_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = DeviceProfile(name="CPU", tpcs=1, flops=((1.0, 1e9),), bandwidth=((1.0, 1e9),), link_bandwidth=1e9)
    monkeypatch.setattr(command, "measure", lambda *arguments: profile)
    monkeypatch.setattr(command, "cpu_name", lambda dtype: "CPU")
    out, figure = tmp_path / "mine.json", tmp_path / "mine.png"
    assert command.calibrate(["--output", str(out), "--plot", str(figure), "--state-dir", str(tmp_path / "state")]) == 0
    assert DeviceProfile.load(out).name == "CPU"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "state").exists()


@on_cpu
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "/no/such/folder/profile.json"], "no directory /no/such/folder: create it first"),
        (["--plot", "figure.bmp"], "must end in one of .png, .svg, .pdf"),
        (["--tpcs", "8,16"], "--tpcs and --device are for GPUs"),
        (["--device", "1"], "--tpcs and --device are for GPUs"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*arguments: Any) -> None:
        raise AssertionError("it was measured first")

    monkeypatch.setattr(command, "measure", measured)
    assert command.calibrate(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("counts", ["", "0,8", "eight", "-4"])
def test_counts_that_are_none(counts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.calibrate(["--tpcs", counts] if not counts.startswith("-") else [f"--tpcs={counts}"])
    assert "TPC counts" in capsys.readouterr().err


def test_counts_are_sorted() -> None:
    assert command.calibrate_parser().parse_args(["--tpcs", "24,8, 16,8"]).tpcs == (8, 16, 24)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_figure_holds_every_side(tmp_path: Path, suffix: str) -> None:
    sides = ("whole device", "planner's decode side", "planner's prefill side", "small", "asked for", "green context")
    timed = [
        Timed(side, count, gemm_s={(8, 8, 8): [1.0 / count]}, read_s=[1.0 / count], read_bytes=64)
        for count, side in enumerate(sides, start=1)
    ]
    timed.append(Timed("small", 2, failure="it hung"))
    points = tuple((float(count), float(count)) for count in range(1, 7))
    draw(DeviceProfile(name="GPU", tpcs=6, flops=points, bandwidth=points), timed, tmp_path / f"figure{suffix}")
    drawn = (tmp_path / f"figure{suffix}").read_bytes()
    assert len(drawn) > 5000
    if suffix == ".svg":
        assert b"http://www.w3.org/2000/svg" in drawn
        assert b"<image" not in drawn
