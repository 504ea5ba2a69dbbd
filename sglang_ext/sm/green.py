"""SM control by green contexts: the driver's own way, coarser, and with TPCs of the driver's choice."""

from __future__ import annotations

import math
from typing import Any

from sglang_ext.sm.control import Handles, Kind, Partition, Streams
from sglang_ext.sm.levels import geometric_levels, nearest_possible

_QUANTUM = 4
"""Levels are multiples of this many TPCs, as the planner's are, where the driver allows."""


def green_levels(
    sm_count: int, granularity: tuple[int, int], max_levels: int = 12, only: int | None = None
) -> tuple[int, ...]:
    """Decode TPC counts that green contexts can make of ``sm_count`` SMs, ascending; empty if none.

    ``granularity`` (least SMs of a part, the SMs that it is a multiple of) as the driver asks for it when thread-block
    clusters must work: 8 and 8 on Hopper. ``only`` asks for the one nearest to that count.
    """
    least_sms, multiple_sms = granularity
    total = sm_count // 2

    def possible(tpcs: int) -> bool:
        sms = 2 * tpcs
        return sms >= least_sms and sms % multiple_sms == 0 and sm_count - sms >= least_sms

    if only is not None:
        return nearest_possible(total, only, possible)
    quantum = math.lcm(2 * _QUANTUM, multiple_sms) // 2
    return geometric_levels(total, quantum, max_levels, possible)


class GreenControl:
    """One pair of green contexts for each level, each with its decode and its prefill stream.

    Creating a pair takes about 1.5 ms and 4 to 6 MiB, so all are made at the start.
    """

    kind: Kind = "green"

    def __init__(self, device: Any, levels: tuple[int, ...]) -> None:
        """``levels`` as :func:`green_levels` says. Raises the driver's CudaError if a context cannot be made."""
        from conflux_native._core import GreenPartition

        self._total = device.sm_count // 2
        self._streams = Streams(device)
        self._pairs: list[Any] = []
        self._handles: dict[int, Handles] = {}
        self._faces: dict[int, Partition] = {}
        self._reserved: dict[int, Partition] = {}
        try:
            self._everywhere = self._streams.make(self._streams.greatest_priority)
            for level in levels:
                self._add(GreenPartition(device, 2 * level))
        except BaseException:
            self.close()
            raise
        self.levels: tuple[int, ...] = tuple(sorted(self._handles))

    def _add(self, pair: Any) -> None:
        self._pairs.append(pair)
        # The driver may round a request up, so what it made is what counts.
        decode_tpcs, prefill_tpcs = (sms // 2 for sms in pair.sm_counts)
        if prefill_tpcs:
            decode = int(pair.create_stream(0, self._streams.greatest_priority))
            prefill = int(pair.create_stream(1, self._streams.least_priority))
            self._handles[decode_tpcs] = Handles(decode, prefill, decode_tpcs, prefill_tpcs)

    def handles(self, tpcs: int) -> Handles:
        handles = self._handles.get(tpcs)
        if handles is None:
            raise ValueError(f"decode cannot be given {tpcs} TPCs here: the levels on offer are {self.levels}")
        return handles

    def partition(self, tpcs: int) -> Partition:
        if tpcs not in self._faces:
            self._faces[tpcs] = self._streams.faces(self.handles(tpcs))
        return self._faces[tpcs]

    def reserve(self, tpcs: int) -> Partition:
        if tpcs not in self._reserved:
            pair = self.handles(tpcs)
            whole = Handles(self._everywhere, pair.prefill, self._total, pair.prefill_tpcs)
            self._reserved[tpcs] = self._streams.faces(whole)
        return self._reserved[tpcs]

    def close(self) -> None:
        for kept in (self._handles, self._faces, self._reserved):
            kept.clear()
        self.levels = ()
        while self._pairs:
            self._pairs.pop().destroy()
        self._streams.close()
