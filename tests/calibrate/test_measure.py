"""The measuring child itself, on a driver that is a stand-in and with a PyTorch of a few lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_ext.calibrate.assemble import gpu_profile
from sglang_ext.calibrate.run import Plan, plan_gpu, run

SHAPES = ((64, 32, 16), (8, 32, 16))
LIGHT = Path(__file__).with_name("light")


@pytest.fixture(autouse=True)
def light_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LIGHT))


def plan(state_dir: Path) -> Plan:
    return plan_gpu(0, state_dir, SHAPES, (), quick=True)


def test_every_set_is_measured(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    made = plan(tmp_path)
    assert made.way == "smctrl"
    found = run(made, total_s=120.0)
    assert found.gpu["name"] == "Light GPU"
    assert found.gpu["reads_by"] == "a plain kernel"
    assert found.gpu["used_by_others"] == pytest.approx((16 - 8 - 1 - 1) / 16)
    assert [found.timed[index].failure for index in range(len(made.sets))] == [""] * len(made.sets)
    for one in found.timed.values():
        assert one.gemm_s == {shape: [pytest.approx(1e-3)] * made.work.repeats for shape in SHAPES}
        assert len(one.read_s) == made.work.repeats
        assert one.bandwidth is not None
    profile = gpu_profile(made, found, None)
    assert (profile.tpcs, profile.flops[-1][0]) == (16, 16.0)


def test_a_gemm_that_never_ends_costs_its_sets(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    made = plan(tmp_path)
    small.setenv("LIGHT_HANG_BELOW_SMS", "10")
    found = run(replace(made, work=replace(made.work, timeout_s=0.3)), total_s=120.0)
    hung = {one.count for one in found.timed.values() if one.failure}
    assert hung == {count for count in (one.count for one in made.sets) if 2 * count < 10}
    assert hung
    assert all("a GEMM did not end" in one.failure for one in found.timed.values() if one.failure)


def test_a_mask_that_does_not_hold_is_reported(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    made = plan(tmp_path)
    small.setenv("STAND_IN_OFFSET", "0x600")  # not where the plan found it
    found = run(made, total_s=120.0)
    whole, *masked = [found.timed[index].failure for index in range(len(made.sets))]
    assert whole == ""
    assert all("the mask does not hold" in failure for failure in masked)


def test_green_contexts(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    small.setenv("STAND_IN_OFFSET", "-1")
    made = plan(tmp_path)
    assert made.way == "green"
    found = run(made, total_s=120.0)
    assert [found.timed[index].failure for index in range(len(made.sets))] == [""] * len(made.sets)
    profile = gpu_profile(made, found, None)
    assert [s for s, _ in profile.flops] == [4.0, 8.0, 12.0, 16.0]
    assert "green contexts" in profile.provenance["flops"]
