from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.columns import LOG_FEATURES, TERMS
from learner.contention import CONTENTION_TERMS
from learner.nearby import MOST_CUT, MOST_POINTS, POINT_WIDTH
from learner.snapshot import COLD_MARGIN, GROUP_NAMES, GROUPS, KNOTS, MAX_BYTES, Snapshot
from tests.learner.test_latency import snapshots

LENGTHS = {
    "coefficients": TERMS,
    "contention": CONTENTION_TERMS,
    "correction": LOG_FEATURES * KNOTS,
    **dict.fromkeys(
        ("correction_weight", "nearby_weight", "offset", "margin", "min_ratio", "max_ratio", "floor_s", "drifting"),
        GROUPS,
    ),
}


@given(snapshots(), st.text(max_size=20), st.integers(0, 10**9), st.floats(0, 1e10))
def test_round_trip(snapshot: Snapshot, text: str, samples: int, created: float) -> None:
    snapshot = msgspec.structs.replace(snapshot, key=text, learner_id=text, samples=samples, created_unix_s=created)
    assert Snapshot.decode(snapshot.encode()) == snapshot
    assert len(snapshot.encode()) < MAX_BYTES // 4


@given(snapshots(), st.data())
def test_a_number_that_cannot_be_is_refused(snapshot: Snapshot, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(sorted(LENGTHS)))
    values = list(getattr(snapshot, field))
    at = data.draw(st.integers(0, len(values) - 1))
    values[at] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e300, -8.0]))
    bad = msgspec.structs.replace(snapshot, **{field: values})
    with pytest.raises(ValueError, match=field):
        bad.validate()
    with pytest.raises(ValueError, match=field):
        Snapshot.decode(bad.encode())


@given(snapshots(), st.sampled_from(sorted(LENGTHS)), st.booleans())
def test_a_wrong_length_is_refused(snapshot: Snapshot, field: str, longer: bool) -> None:
    values = getattr(snapshot, field)
    bad = msgspec.structs.replace(snapshot, **{field: [*values, 1.0] if longer else values[:-1]})
    with pytest.raises(ValueError, match=f"{field} has .* numbers, not {LENGTHS[field]}"):
        bad.validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "schema 1"),
        ({"version": -1}, "version -1"),
        ({"samples": -1}, "samples -1"),
        ({"created_unix_s": math.nan}, "creation time"),
        ({"coverage": math.nan}, "coverage"),
        ({"coverage": 1.0}, "coverage"),
        ({"nearby": [0.0] * (POINT_WIDTH - 1)}, "nearby has"),
        ({"nearby": [0.0] * (POINT_WIDTH * (MOST_POINTS + 1))}, "nearby has"),
        ({"nearby": [0.0] * (POINT_WIDTH - 2) + [MOST_CUT + 0.1, 0.5]}, "nearby has a number"),
        ({"nearby": [0.0] * (POINT_WIDTH - 1) + [math.nan]}, "nearby has a number"),
        ({"sizes": [64.0, 128.0], "size_shift": [0.1]}, "size_shift has 1 numbers, not 2"),
        ({"sizes": [64.0, 64.0], "size_shift": [0.1, 0.1]}, "sizes do not ascend"),
        ({"sizes": [64.0], "size_shift": [math.nan]}, "size_shift has a number"),
        ({"sizes": [1.0 * n for n in range(129)], "size_shift": [0.0] * 129}, "sizes has 129 numbers"),
        ({"margin": [0.99] * GROUPS}, "margin"),
        ({"floor_s": [11.0] * GROUPS}, "floor_s"),
        ({"drifting": [1.1] * GROUPS}, "drifting"),
        ({"min_ratio": [2.0] * GROUPS, "max_ratio": [1.0] * GROUPS}, "min_ratio exceeds"),
    ],
)
def test_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(Snapshot.roofline(), **change).validate()


@given(st.binary(max_size=400))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a snapshot|snapshot"):
        Snapshot.decode(data)


@given(snapshots(), st.integers(0, 2000), st.integers(0, 255))
def test_a_damaged_snapshot_is_refused_or_sound(snapshot: Snapshot, at: int, byte: int) -> None:
    data = bytearray(snapshot.encode())
    data[at % len(data)] = byte
    try:
        decoded = Snapshot.decode(bytes(data))
    except ValueError:
        return
    decoded.validate()


def test_a_huge_message_is_refused_unread() -> None:
    with pytest.raises(ValueError, match="larger than"):
        Snapshot.decode(bytes(MAX_BYTES + 1))


def test_the_roofline_is_sound() -> None:
    Snapshot.roofline().validate()
    assert Snapshot.roofline().version == 0


def test_groups_in_drift_have_names_and_a_least_bound() -> None:
    assert len(GROUP_NAMES) == len(set(GROUP_NAMES)) == GROUPS
    snapshot = msgspec.structs.replace(Snapshot.roofline(), drifting=[0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert snapshot.drifting_groups == ["decode", "prefill_beside"]
    assert snapshot.least_upper == [0.0, COLD_MARGIN, 0.0, COLD_MARGIN, 0.0, 0.0]
