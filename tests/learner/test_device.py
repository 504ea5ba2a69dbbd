from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.device import DeviceProfile, shipped_names


def device(**changes: Any) -> DeviceProfile:
    fields: dict[str, Any] = {
        "name": "device",
        "tpcs": 8,
        "flops": ((2.0, 10.0), (8.0, 40.0)),
        "bandwidth": ((4.0, 6.0), (8.0, 8.0)),
    }
    return DeviceProfile(**{**fields, **changes})


def test_interpolates_between_points_and_through_the_origin() -> None:
    np.testing.assert_allclose(device().flops_at([1, 2, 5, 8]), [5.0, 10.0, 25.0, 40.0])
    np.testing.assert_allclose(device().bandwidth_at([1, 2, 4, 6, 8]), [1.5, 3.0, 6.0, 7.0, 8.0])


def test_clips_to_one_tpc_and_the_whole_device() -> None:
    np.testing.assert_allclose(device().flops_at([-3, 0, 0.5, 9, 1e9]), [5.0, 5.0, 5.0, 40.0, 40.0])
    assert device().flops_at(np.ones((2, 3))).shape == (2, 3)
    assert float(device().flops_at(8)) == 40.0


def test_a_device_of_one_partition() -> None:
    cpu = device(tpcs=1, flops=((1.0, 5.0),), bandwidth=((1.0, 7.0),))
    assert float(cpu.flops_at(1)) == 5.0
    np.testing.assert_array_equal(cpu.bandwidth_at([0, 1, 2]), [7.0, 7.0, 7.0])


@given(st.lists(st.floats(1e-3, 1e15), min_size=1, max_size=8), st.lists(st.floats(-10, 100), min_size=2))
def test_more_tpcs_are_never_slower(rates: list[float], tpcs: list[float]) -> None:
    points = tuple((float(2 * (i + 1)), rate) for i, rate in enumerate(rates))
    profile = device(tpcs=2 * len(rates), flops=points, bandwidth=points)
    at = np.sort(tpcs)
    for curve in (profile.flops_at(at), profile.bandwidth_at(at)):
        assert (curve > 0.0).all()
        assert (np.diff(curve) >= -1e-12 * curve[1:]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"name": ""}, "no name"),
        ({"tpcs": 0}, "tpcs must be at least 1"),
        ({"flops": ()}, "flops has no points"),
        ({"flops": ((2.0, 1.0), (2.0, 2.0))}, "ascending"),
        ({"flops": ((0.0, 1.0), (8.0, 2.0))}, "ascending"),
        ({"flops": ((2.0, 1.0),)}, "last point is at 2.0 TPCs, but the device has 8"),
        ({"bandwidth": ((8.0, 0.0),)}, "must be positive"),
        ({"bandwidth": ((8.0, math.inf),)}, "must be positive and finite"),
        ({"bandwidth": ((math.nan, 1.0), (8.0, 1.0))}, "ascending"),
        ({"link_bandwidth": -1.0}, "link_bandwidth"),
        ({"link_bandwidth": math.nan}, "link_bandwidth"),
    ],
)
def test_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        device(**changes)


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    profile = device(link_bandwidth=3.5, provenance={"flops": "measured"})
    path = tmp_path / "new" / "profile.json"
    profile.save(path)
    assert DeviceProfile.load(path) == profile
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]
    assert json.loads(path.read_text())["link_bandwidth"] == 3.5


@pytest.mark.parametrize(
    "content", ["", "{", '{"name": "x"}', '{"name": "x", "tpcs": 1, "flops": [], "bandwidth": []}']
)
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=str(path)):
        DeviceProfile.load(path)


def test_the_shipped_h200() -> None:
    assert "h200" in shipped_names()
    profile = DeviceProfile.shipped("h200")
    assert profile.tpcs == 66
    # An earlier measurement of another GPU of this kind, by another program.
    np.testing.assert_allclose(
        profile.flops_at([2, 13, 20, 33, 48, 66]), np.array([28, 171, 253, 420, 552, 677]) * 1e12, rtol=0.1
    )
    np.testing.assert_allclose(profile.bandwidth_at([24, 66]), np.array([4135, 4250]) * 1e9, rtol=0.1)
    assert profile.link_bandwidth > 0.0
    assert profile.provenance


def test_an_unknown_shipped_profile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no shipped profile '\.\./h200'"):
        DeviceProfile.shipped("../h200")
