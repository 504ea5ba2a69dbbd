from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_native.offsets import KNOWN, LAST_OFFSET, candidates, known_offset

VERSIONS = st.integers(12000, 20990)


@pytest.mark.parametrize(
    ("version", "offset"),
    [(12000, 0x4CC), (12010, 0x4CC), (12080, 0x4FC), (13000, 0x51C), (13030, 0x5FC), (12090, None), (11080, None)],
)
def test_known_offsets_are_looked_up_by_the_drivers_cuda_version(version: int, offset: int | None) -> None:
    assert known_offset(version) == offset


def test_every_known_offset_can_be_written() -> None:
    assert all(0 < offset <= LAST_OFFSET and offset % 4 == 0 for offset in KNOWN.values())


@given(VERSIONS)
def test_candidates_are_the_whole_aligned_range_once_each(version: int) -> None:
    offsets = candidates(version)
    assert sorted(offsets) == list(range(4, LAST_OFFSET + 1, 4))


@given(VERSIONS)
def test_known_offsets_come_first_this_drivers_own_before_all(version: int) -> None:
    offsets = candidates(version)
    others = set(KNOWN.values())
    assert set(offsets[: len(others)]) == others
    own = known_offset(version)
    assert own is None or offsets[0] == own


def test_an_unknown_version_begins_with_its_neighbours() -> None:
    assert candidates(12090)[:2] == [0x4FC, 0x51C]
    assert candidates(13020)[0] == 0x5FC
    assert candidates(14000)[0] == 0x5FC


def test_drivers_of_another_layout_have_no_candidates() -> None:
    with pytest.raises(ValueError, match=r"before CUDA 12\.0"):
        candidates(11080)
