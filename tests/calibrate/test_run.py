"""Measuring goes on behind sets that hang or crash, and what comes of it is a profile."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conflux_native.topology import Topology
from learner.device import DeviceProfile
from sglang_ext.calibrate.assemble import gpu_profile
from sglang_ext.calibrate.command import table
from sglang_ext.calibrate.measure import Work
from sglang_ext.calibrate.run import CalibrationError, Measured, Plan, run
from sglang_ext.calibrate.sets import TpcSet, masked_sets
from sglang_ext.device import CALIBRATED, PCIE_BANDWIDTH, measured_unix_s
from sglang_ext.sm.planner import PartitionPlanner

FAKE = Path(__file__).with_name("fake.py")
SHAPES = [(8192, 4096, 4096), (64, 4096, 12288)]
SETS = masked_sets(PartitionPlanner(Topology.recorded("h200")), quick=True)
PLAN = Plan("smctrl", SETS, Work(0, "libcuda.so.1", 0x51C, [], SHAPES, 5), 13000, "/usr/lib/libcuda.so.580.159.04")


def measured(trouble: dict[str, Any], plan: Plan = PLAN, **limits: float) -> tuple[Measured, list[int]]:
    done: list[int] = []
    command = [sys.executable, str(FAKE), json.dumps(trouble)]
    wide = {"first_s": 60.0, "silence_s": 60.0, "total_s": 100.0}
    return run(plan, done.append, command=command, **{**wide, **limits}), done


def failures(found: Measured) -> dict[int, str]:
    return {index: one.failure for index, one in found.timed.items() if one.failure}


def test_all_sets_are_measured() -> None:
    found, done = measured({})
    assert sorted(found.timed) == list(range(len(SETS)))
    assert failures(found) == {}
    assert [found.timed[index].count for index in sorted(found.timed)] == [one.count for one in SETS]
    assert done == sorted(done)
    assert done[-1] == len(SETS)


def test_a_set_that_fails_in_order_is_passed_over() -> None:
    found, _ = measured({"1": "fail"})
    assert failures(found) == {1: "a GEMM did not end"}


@pytest.mark.parametrize("trouble", ["hung", "crash"])
def test_sets_that_end_their_child_cost_only_themselves(trouble: str) -> None:
    found, _ = measured({"1": trouble, "3": trouble})
    assert set(failures(found)) == {1, 3}
    assert sorted(found.timed) == list(range(len(SETS)))


def test_a_set_that_hangs_without_a_word() -> None:
    found, _ = measured({"2": "hang"}, silence_s=3.0)
    assert set(failures(found)) == {2}
    assert "hung" in failures(found)[2]


def test_a_link_that_ends_the_child_costs_no_set() -> None:
    found, _ = measured({"link": "crash"})
    assert failures(found) == {}
    assert found.link["bytes_per_s"] == 0.0
    assert "SIGKILL" in found.link["method"]


def test_too_many_casualties_end_it() -> None:
    found, _ = measured({str(index): "crash" for index in range(len(SETS))})
    assert sorted(found.timed) == list(range(len(SETS)))
    assert set(failures(found)) == set(range(len(SETS)))
    with pytest.raises(CalibrationError, match="the whole device could not be measured: the measuring process failed"):
        gpu_profile(PLAN, found, None)


@pytest.mark.parametrize(("trouble", "word"), [("crash", "failed"), ("hang", "hung")])
def test_a_child_that_cannot_begin(trouble: str, word: str) -> None:
    with pytest.raises(CalibrationError, match=f"the measuring process {word}"):
        measured({"start": trouble}, first_s=1.0 if trouble == "hang" else 60.0)


def test_the_profile(tmp_path: Path) -> None:
    found, _ = measured({"link": 300e9, "3": "fail"})
    profile = gpu_profile(PLAN, found, DeviceProfile.shipped("h200"))
    profile.save(tmp_path / "profile.json")
    assert DeviceProfile.load(tmp_path / "profile.json") == profile
    assert (profile.name, profile.tpcs) == ("NVIDIA H200", 66)
    assert profile.flops[-1] == (66.0, pytest.approx(600e12))
    assert profile.bandwidth[-1] == (66.0, pytest.approx(4e12))
    failed = SETS[3]
    counts = {float(one.count) for one in SETS if one != failed}
    assert {s for s, _ in profile.flops} == counts
    assert profile.link_bandwidth == 300e9
    told = profile.provenance
    assert told["source"] == CALIBRATED
    assert measured_unix_s(profile) is not None
    assert told["driver"] == "580.159.04, CUDA 13.0"
    assert told["torch"] == "2.11.0, CUDA 13.0"
    assert "8192x4096x4096" in told["flops"]
    assert "streams masked" in told["flops"]
    assert "1 GiB" in told["bandwidth"]
    assert f"{failed.count} TPCs" in told["skipped"]
    assert "whole device 66" in told["tpc_sets"]
    text = table(profile, [found.timed[index] for index in sorted(found.timed)])
    assert "   66         600.0         600.0      4000.0  whole device" in text.splitlines()
    assert f"skipped: {failed.count} TPCs ({failed.side}): a GEMM did not end" in text


def test_a_link_that_was_not_measured() -> None:
    found, _ = measured({})
    shipped = DeviceProfile.shipped("h200")
    profile = gpu_profile(PLAN, found, shipped)
    assert profile.link_bandwidth == shipped.link_bandwidth
    assert "as shipped for NVIDIA H200" in profile.provenance["link_bandwidth"]
    profile = gpu_profile(PLAN, found, None)
    assert profile.link_bandwidth == PCIE_BANDWIDTH
    assert profile.provenance["link_bandwidth"].startswith("assumed")


def test_without_sm_control_one_point() -> None:
    plan = dataclasses.replace(PLAN, way="none", sets=[TpcSet("whole device", 0)])
    found, _ = measured({}, plan)
    profile = gpu_profile(plan, found, None)
    assert profile.flops == ((66.0, pytest.approx(600e12)),)
    assert len(profile.bandwidth) == 1
    assert "the whole device alone" in profile.provenance["flops"]
