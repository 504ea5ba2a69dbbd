"""Which curves a server starts with: calibrated here, then shipped, then measured at an earlier start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from learner.device import DeviceProfile
from sglang_ext import device
from sglang_ext.device import CALIBRATED, device_profile, find_profile, measured_unix_s, profile_path, shipped_profile

H200 = "NVIDIA H200"


def profile(name: str = H200, tpcs: int = 66, *, source: str = "", link_bandwidth: float = 1e9) -> DeviceProfile:
    points = ((float(tpcs), 1e12),)
    provenance = {"source": source} if source else {}
    return DeviceProfile(
        name=name, tpcs=tpcs, flops=points, bandwidth=points, link_bandwidth=link_bandwidth, provenance=provenance
    )


def keep(state_dir: Path, kept: DeviceProfile) -> DeviceProfile:
    kept.save(profile_path(state_dir, kept.name))
    return kept


def source(name: str, tpcs: int, state_dir: Path) -> str | None:
    found = find_profile(name, tpcs, state_dir)
    return None if found is None else found.source


def test_calibrated_then_shipped_then_measured(tmp_path: Path) -> None:
    assert source(H200, 66, tmp_path) == "shipped"
    keep(tmp_path, profile())
    assert source(H200, 66, tmp_path) == "shipped"
    calibrated = keep(tmp_path, profile(source=CALIBRATED))
    found = find_profile(H200, 66, tmp_path)
    assert found == (calibrated, "calibrated", str(profile_path(tmp_path, H200)))
    assert source("Some GPU", 10, tmp_path) is None
    keep(tmp_path, profile("Some GPU", 10))
    assert source("Some GPU", 10, tmp_path) == "measured"


@pytest.mark.parametrize(
    ("name", "tpcs", "shipped"),
    [
        (H200, 66, True),
        ("NVIDIA H200 NVL", 66, True),
        ("NVIDIA GH200 480GB", 66, False),
        ("NVIDIA H200 MIG 1g.18gb", 8, False),
        ("NVIDIA H2000", 66, False),
        ("NVIDIA H100", 66, False),
    ],
)
def test_which_gpus_a_shipped_profile_is_for(name: str, tpcs: int, shipped: bool) -> None:
    assert (shipped_profile(name, tpcs) is not None) is shipped


@pytest.mark.parametrize(
    "unfit",
    [profile(source=CALIBRATED, tpcs=8), profile(source=CALIBRATED, link_bandwidth=0.0)],
    ids=["another size", "no link"],
)
def test_a_file_that_does_not_describe_this_device(
    tmp_path: Path, unfit: DeviceProfile, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path, unfit)
    with caplog.at_level(logging.WARNING):
        assert source(H200, 66, tmp_path) == "shipped"
    assert str(profile_path(tmp_path, H200)) in caplog.text


def test_a_broken_file_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = profile_path(tmp_path, H200)
    path.parent.mkdir()
    path.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert source(H200, 66, tmp_path) == "shipped"
    assert f"{path} cannot be used" in caplog.text


def test_a_server_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(kind: str, dtype: str, name: str) -> DeviceProfile:
        measured.append(name)
        return profile(name, 1)

    monkeypatch.setattr(device, "measure", measure)
    monkeypatch.setattr(device, "cpu_name", lambda dtype: f"CPU {dtype}")
    first = device_profile("cpu", "float32", str(tmp_path))
    assert device_profile("cpu", "float32", str(tmp_path)) == first
    assert measured == [first.name]
    calibrated = keep(tmp_path, profile(first.name, 1, source=CALIBRATED))
    assert device_profile("cpu", "float32", str(tmp_path)) == calibrated


def test_a_state_directory_that_cannot_be_written_costs_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "devices").write_text("in the way")
    monkeypatch.setattr(device, "measure", lambda kind, dtype, name: profile(name, 1))
    monkeypatch.setattr(device, "cpu_name", lambda dtype: f"CPU {dtype}")
    with caplog.at_level(logging.WARNING):
        assert device_profile("cpu", "float32", str(tmp_path)).tpcs == 1
    assert "could not be kept" in caplog.text


@pytest.mark.parametrize(
    ("provenance", "expected"),
    [({"measured": "1970-01-02T00:00:01Z"}, 86401.0), ({"measured": "yesterday"}, None), ({}, None)],
)
def test_when_a_profile_was_measured(provenance: dict[str, Any], expected: float | None) -> None:
    points = ((1.0, 1.0),)
    one = DeviceProfile(name="any", tpcs=1, flops=points, bandwidth=points, provenance=provenance)
    assert measured_unix_s(one) == expected
