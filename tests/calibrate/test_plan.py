"""What is planned for a GPU, found out from a driver that is a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.calibrate.run import CalibrationError, Plan, plan_gpu
from sglang_ext.calibrate.sets import TpcSet

SHAPES = ((4096, 4096, 4096),)


def plan(state_dir: Path, *counts: int) -> Plan:
    return plan_gpu(0, state_dir, SHAPES, counts, quick=False)


def test_masks_where_they_work(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    made = plan(tmp_path)
    assert (made.way, made.work.mask_offset, made.notes) == ("smctrl", 0x51C, ())
    assert made.sets[0] == TpcSet("whole device", 16)
    assert all(one.tpcs for one in made.sets[1:])
    assert len(made.sets) > 2
    assert made.cuda_version == 13000
    assert [one.count for one in plan(tmp_path, 4, 8).sets] == [16, 8, 4]
    for count in (1, 6):
        with pytest.raises(ValueError, match=f"{count} TPCs cannot be measured"):
            plan(tmp_path, count)


def test_a_chip_without_clusters_is_divided_as_one_likes(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    small.setenv("STAND_IN_CAPABILITY", "86")
    assert [one.count for one in plan(tmp_path, 1, 6).sets] == [16, 6, 1]


def test_green_contexts_where_masks_do_not(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    small.setenv("STAND_IN_OFFSET", "-1")
    made = plan(tmp_path)
    assert made.way == "green"
    assert [one.green_sms for one in made.sets] == [0, 24, 16, 8]
    assert "stream masks cannot be used" in made.notes[0]


def test_the_whole_device_where_nothing_works(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    small.setenv("STAND_IN_OFFSET", "-1")
    small.setenv("STAND_IN_FAIL", "cuDeviceGetDevResource=1")
    made = plan(tmp_path)
    assert made.way == "none"
    assert made.sets == [TpcSet("whole device", 0)]
    assert "green contexts cannot be used" in made.notes[1]
    with pytest.raises(ValueError, match="--tpcs needs SM control"):
        plan(tmp_path, 8)


def test_a_gpu_that_is_not_there_or_cannot_be_opened(tmp_path: Path, small: pytest.MonkeyPatch) -> None:
    with pytest.raises(CalibrationError, match="GPU 1 cannot be used: the driver sees 1"):
        plan_gpu(1, tmp_path, SHAPES, (), quick=True)
    small.setenv("STAND_IN_FAIL", "cuInit=100")
    with pytest.raises(CalibrationError, match="cuInit"):
        plan(tmp_path)
