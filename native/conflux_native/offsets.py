"""Where a driver keeps a stream's SM mask: the known offsets, and the order in which to look for an unknown one.

The mask's existence, its place inside a stream's structure and the offsets of several drivers were first published by
Bakita and Anderson, "Hardware Compute Partitioning on NVIDIA GPUs" (RTAS 2023), and their later work (ECRTS 2025).
The offsets are facts about NVIDIA's drivers; none of them is trusted before it has been verified on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

KNOWN: Final[Mapping[tuple[int, int], int]] = MappingProxyType(
    {
        (12, 0): 0x4CC,
        (12, 1): 0x4CC,
        (12, 2): 0x4E4,
        (12, 3): 0x49C,
        (12, 4): 0x4AC,
        (12, 5): 0x4EC,
        (12, 6): 0x4EC,
        (12, 7): 0x4FC,
        (12, 8): 0x4FC,
        (13, 0): 0x51C,
        (13, 3): 0x5FC,
    }
)
"""(CUDA major, minor) → byte offset of the mask in a stream's structure, x86-64."""

OLDEST_VERSION: Final = 12000
"""Drivers before CUDA 12.0 lay the mask out in another way, so no offset fits them."""

LAST_OFFSET: Final = 4092
"""The search ends here (bytes); the structure itself is not known to be larger."""


def known_offset(version: int) -> int | None:
    """The offset (bytes) known for a driver, or None.

    ``version`` is what ``cuDriverGetVersion`` returns: 13000 for CUDA 13.0.
    """
    return KNOWN.get(_pair(version))


def candidates(version: int) -> list[int]:
    """Every possible offset (bytes, multiples of 4 up to :data:`LAST_OFFSET`), the likeliest first, each once.

    First the one known for ``version``; then those of other versions, the nearest version first (neighbours often share
    one); then the rest by distance to a known offset, those that lie in their words as all known ones do (4 above a
    multiple of 8) before the others. Raises ValueError for a driver before CUDA 12.0.
    """
    if version < OLDEST_VERSION:
        raise ValueError(f"CUDA version {version}: drivers before CUDA 12.0 keep the mask in another layout")
    here = _ordinal(_pair(version))
    by_version = sorted(KNOWN, key=lambda pair: (abs(_ordinal(pair) - here), pair))
    first = list(dict.fromkeys(KNOWN[pair] for pair in by_version))
    known = set(first)
    rest = (offset for offset in range(4, LAST_OFFSET + 1, 4) if offset not in known)
    return first + sorted(rest, key=lambda o: (o % 8 != 4, min(abs(o - k) for k in known), o))


def _pair(version: int) -> tuple[int, int]:
    return version // 1000, version % 1000 // 10


def _ordinal(pair: tuple[int, int]) -> int:
    # CUDA 13.0 follows 12.9.
    return pair[0] * 10 + pair[1]
