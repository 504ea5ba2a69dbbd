"""The choice, with real children, on a stand-in for the driver: the best way that passes, and the reasons."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

conflux_native = pytest.importorskip("conflux_native")
if not conflux_native.AVAILABLE:
    pytest.skip(conflux_native.WHY_NOT, allow_module_level=True)

from sglang_ext.sm import select  # noqa: E402
from sglang_ext.sm.select import Chosen, choose  # noqa: E402
from sglang_ext.sm.watched import Limits, Report, run_self_test  # noqa: E402
from tests.native.standin import StandIn  # noqa: E402

LEVELS = (8, 12, 16, 20, 24, 32, 40, 48)
LIMITS = Limits(start_s=60.0, level_s=30.0, probe_s=10.0, total_s=120.0)
# What must hang is given little time; nothing else runs under these.
HANGING = dataclasses.replace(LIMITS, probe_s=1.0, total_s=300.0)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def driver(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv(select.LIBCUDA, stand_in.path)
    return stand_in


class Everywhere:
    """Sets the stand-in's properties here and in children."""

    def __init__(self, library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library, self.monkeypatch = library, monkeypatch

    def set(self, **settings: object) -> None:
        self.library.set(**settings)
        self.in_children(**settings)

    def in_children(self, **settings: object) -> None:
        for name, value in settings.items():
            self.monkeypatch.setenv(f"STAND_IN_{name}", str(value))


@pytest.fixture
def gpu(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> Everywhere:
    return Everywhere(driver, monkeypatch)


def made(kind: str, state_dir: Path, **settings: Any) -> Chosen:
    settings = {"limits": LIMITS, "gemm": "skip", **settings}
    chosen = choose(kind, 0, str(state_dir), logging.getLogger("test"), **settings)
    if chosen.control.levels:
        assert chosen.control.handles(chosen.control.levels[0]).decode_tpcs == chosen.control.levels[0]
    return chosen


def no_test(*args: Any) -> Report:
    raise AssertionError("the self-test ran")


def test_stream_masks_are_taken_where_they_pass(gpu: Everywhere, tmp_path: Path, caplog: Any) -> None:
    chosen = made("auto", tmp_path)
    assert (chosen.control.kind, chosen.control.levels) == ("smctrl", LEVELS)
    assert not chosen.fell_back
    assert chosen.reports["smctrl"].levels == LEVELS
    assert chosen.reasons["green"] == "not needed: smctrl is in use"
    assert "decode on 8, 12, 16, 20, 24, 32, 40, 48 of 66 TPCs tested (now," in chosen.reasons["smctrl"]
    assert chosen.state() == {
        "wanted": "auto",
        "kind": "smctrl",
        "levels": list(LEVELS),
        "reasons": chosen.reasons,
    }
    said = [record for record in caplog.records if record.name == "test"]
    assert [record.levelname for record in said] == ["INFO"]
    assert "SM control by stream masks (smctrl" in said[0].getMessage()


def test_a_passed_test_is_remembered(gpu: Everywhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made("auto", tmp_path)
    monkeypatch.setattr(select, "run_self_test", no_test)
    again = made("auto", tmp_path)
    assert again.control.levels == first.control.levels
    assert again.reports == first.reports
    assert "(remembered," in again.reasons["smctrl"]
    # Not for a server that needs more of the test, another driver, or one that asks for no memory.
    for other in ({"gemm": "require"}, {"memory": False}, {"only": 20}, {"shapes": [(1024, 1024)]}):
        assert made("auto", tmp_path, **other).control.kind == "none"
    gpu.set(VERSION=12080, OFFSET=0x4FC)
    assert made("auto", tmp_path).control.kind == "none"


def test_shapes_in_any_order_are_the_same_test(
    gpu: Everywhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made("green", tmp_path, shapes=((2048, 1024), (1024, 2048)))
    monkeypatch.setattr(select, "run_self_test", no_test)
    again = [(1024, 2048), (2048, 1024), (1024, 2048)]
    assert "(remembered," in made("green", tmp_path, shapes=again).reasons["green"]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The self-test's GEMMs run on the CPU, and some may never end."""
    pytest.importorskip("torch")
    child = (sys.executable, "-P", str(Path(__file__).with_name("on_cpu.py")))
    monkeypatch.setattr(select, "run_self_test", functools.partial(run_self_test, command=child))
    return monkeypatch


def test_a_level_that_hangs_in_a_gemm_of_one_shape_is_lost(
    gpu: Everywhere, tmp_path: Path, hanging: pytest.MonkeyPatch
) -> None:
    hanging.setenv("ON_CPU_HANG", "8,20:24x48")
    chosen = made("smctrl", tmp_path, shapes=((32, 16), (24, 48)), gemm="require", limits=HANGING)
    assert chosen.control.levels == (12, 16, 24, 32, 40, 48)
    why = "a bf16 GEMM of K = 24, N = 48 on the decode stream did not end within 1 s"
    report = chosen.reports["smctrl"]
    assert report.lost == {8: why, 20: why}
    assert report.gemm == "checked"
    assert f"8 not offered: {why}; 20 not offered" in chosen.reasons["smctrl"]


def test_more_levels_lost_to_a_gemm_refuse_the_way(
    gpu: Everywhere, tmp_path: Path, hanging: pytest.MonkeyPatch
) -> None:
    hanging.setenv("ON_CPU_HANG", "8,12,16:24x48")
    chosen = made("green", tmp_path, shapes=((24, 48),), gemm="require", limits=HANGING)
    assert chosen.control.kind == "none"
    assert "with decode on 16 TPCs: a bf16 GEMM of K = 24, N = 48" in chosen.reasons["green"]


def test_shapes_that_are_none_are_a_reason(gpu: Everywhere, tmp_path: Path) -> None:
    chosen = made("green", tmp_path, shapes=((0, 16),))
    assert chosen.control.kind == "none"
    assert "exit status 2" in chosen.reasons["green"]


def test_a_remembered_test_that_no_longer_holds_is_repeated(
    gpu: Everywhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made("green", tmp_path)
    tested: list[str] = []

    def test_again(way: str, *args: Any) -> Report:
        tested.append(way)
        return Report(levels=(8,), gemm="checked")

    monkeypatch.setattr(select, "run_self_test", test_again)
    real, checks = select._Choice._in_use, []

    def fails_once(self: Any, *args: Any) -> Any:
        checks.append(args)
        if len(checks) == 1:
            raise RuntimeError("not as remembered")
        return real(self, *args)

    monkeypatch.setattr(select._Choice, "_in_use", fails_once)
    chosen = made("green", tmp_path)
    assert tested == ["green"]
    assert chosen.control.levels == (8,)


def test_one_level_can_be_asked_for(gpu: Everywhere, tmp_path: Path) -> None:
    assert made("auto", tmp_path, only=22).control.levels == (22,)
    assert made("green", tmp_path, only=22).control.levels == (24,)


def test_green_contexts_stand_in_where_no_mask_is_found(gpu: Everywhere, tmp_path: Path, caplog: Any) -> None:
    gpu.set(OFFSET=-1)
    chosen = made("auto", tmp_path)
    assert (chosen.control.kind, chosen.control.levels) == ("green", LEVELS)
    assert chosen.fell_back
    assert "no stream mask found" in chosen.reasons["smctrl"]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING" and record.name == "test"]
    assert len(said) == 1
    assert "asked for: auto, in use: green. stream masks (smctrl): no stream mask found" in said[0]


def test_green_contexts_stand_in_where_this_process_is_not_as_the_child_was(gpu: Everywhere, tmp_path: Path) -> None:
    gpu.library.set(OFFSET=0x600)
    chosen = made("smctrl", tmp_path)
    assert chosen.control.kind == "green"
    assert chosen.fell_back
    assert "kernels ran on SMs outside of the plan" in chosen.reasons["smctrl"]
    assert not list((tmp_path / "sm").glob("sm-self-test*smctrl*"))


def test_nothing_is_in_use_where_nothing_works(old: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.LIBCUDA, old.path)
    Everywhere(old, monkeypatch).set(OFFSET=-1)
    chosen = made("auto", tmp_path)
    assert (chosen.control.kind, chosen.control.levels) == ("none", ())
    assert chosen.fell_back
    assert "no stream mask found" in chosen.reasons["smctrl"]
    assert "no green contexts" in chosen.reasons["green"]


def test_a_hung_test_costs_its_process_and_some_time(gpu: Everywhere, tmp_path: Path) -> None:
    gpu.in_children(HANG_KERNELS="conflux_cluster")
    begin_s = time.monotonic()
    chosen = made("auto", tmp_path, limits=HANGING)
    assert time.monotonic() - begin_s < HANGING.total_s
    assert chosen.control.kind == "none"
    for way in ("smctrl", "green"):
        assert "the self-test failed" in chosen.reasons[way]
    assert "with decode on 8 TPCs" in chosen.reasons["green"]
    # This process can still use the GPU.
    device = conflux_native.Device(conflux_native.Driver(gpu.library.path))
    assert sum(device.smid_histogram(device.create_stream())) > 0


def test_a_level_that_hangs_is_not_offered(gpu: Everywhere, tmp_path: Path) -> None:
    gpu.in_children(HANG_BELOW_TPCS=10)
    chosen = made("green", tmp_path, limits=HANGING)
    assert chosen.control.levels == LEVELS[1:]
    assert "8 not offered" in chosen.reasons["green"]


def test_forced_green_does_not_touch_masks(gpu: Everywhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conflux_native.search.find_slot", no_test)
    chosen = made("green", tmp_path)
    assert chosen.control.kind == "green"
    assert not chosen.fell_back
    assert chosen.reasons["smctrl"] == "--conflux-sm-control green"


def test_a_test_without_torchs_gemms_is_not_enough_to_serve(
    gpu: Everywhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "torch.py"
    stub.write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n__version__ = '2.0+stub'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    chosen = made("green", tmp_path, gemm="require")
    assert chosen.control.kind == "none"
    assert "torch 2.0+stub finds no CUDA device" in chosen.reasons["green"]
    chosen = made("green", tmp_path, gemm="auto")
    assert chosen.control.kind == "green"
    assert "GEMMs not checked: torch 2.0+stub finds no CUDA device" in chosen.reasons["green"]


def test_no_driver_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.LIBCUDA, str(tmp_path / "libcuda.so.1"))
    chosen = made("auto", tmp_path)
    assert chosen.control.kind == "none"
    assert "libcuda.so.1" in chosen.reasons["smctrl"]
    assert chosen.reasons["smctrl"] == chosen.reasons["green"]


def test_no_extension_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflux_native, "AVAILABLE", False)
    monkeypatch.setattr(conflux_native, "WHY_NOT", "conflux_native has no extension: no compiler")
    assert made("auto", tmp_path).reasons["green"] == "conflux_native has no extension: no compiler"


def test_a_driver_that_fails_is_a_reason(gpu: Everywhere, tmp_path: Path) -> None:
    gpu.set(FAIL="cuDevicePrimaryCtxRetain=2")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in made("auto", tmp_path).reasons["smctrl"]


def test_a_state_directory_that_cannot_be_written_costs_only_time(gpu: Everywhere, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert made("green", blocked / "state").control.kind == "green"


@pytest.mark.parametrize(("wanted", "fell_back"), [("auto", False), ("none", False), ("smctrl", True), ("green", True)])
def test_a_cpu_has_none_and_says_so_only_to_who_insists(wanted: str, fell_back: bool, caplog: Any) -> None:
    chosen = choose(wanted, None, "/nowhere", logging.getLogger("test"))
    assert chosen.control.kind == "none"
    assert chosen.reasons == {"smctrl": "a CPU has no SMs", "green": "a CPU has no SMs"}
    assert chosen.fell_back == fell_back
    assert bool(caplog.records) == fell_back


def test_none_tests_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(select, "run_self_test", no_test)
    chosen = choose("none", 0, "/nowhere", logging.getLogger("test"))
    assert chosen.control.kind == "none"
    assert not chosen.fell_back
    assert not caplog.records
