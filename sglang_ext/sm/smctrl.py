"""SM control by stream masks, as libsmctrl does it.

Bakita and Anderson, "Hardware Compute Partitioning on NVIDIA GPUs" (RTAS 2023), found that the driver keeps a mask of
disabled TPCs in each stream's structure and copies it into every kernel that is launched there.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.sm.control import Handles, Kind, Partition, Streams
from sglang_ext.sm.planner import PartitionPlanner


class SmctrlControl:
    """One decode stream for each level with its mask set for good, and one prefill stream whose mask changes.

    A mask change costs about 20 ns, so it is done per iteration. Decode needs streams of its own per level because a
    CUDA graph keeps the mask of its capture.
    """

    kind: Kind = "smctrl"

    def __init__(self, device: Any, slot: Any, planner: PartitionPlanner, levels: tuple[int, ...]) -> None:
        """``slot`` is a ``conflux_native`` MaskSlot *verified on this driver*; ``levels`` are of the planner's.

        Raises the driver's CudaError if a stream cannot be made.
        """
        from conflux_native._core import Mask

        self.levels = levels
        self.planner = planner
        self._slot = slot
        self._streams = Streams(device)
        self._prefill_masks: dict[int, Any] = {}
        self._masked: list[int] = []
        self._handles: dict[int, Handles] = {}
        self._faces: dict[int, Partition] = {}
        self._reserved: dict[int, Partition] = {}
        try:
            self._everywhere = self._streams.make(self._streams.greatest_priority)
            self._prefill = self._make(self._streams.least_priority)
            for level in levels:
                split = planner.split(level)
                decode = self._make(self._streams.greatest_priority)
                slot.apply(decode, Mask(split.decode))
                self._prefill_masks[level] = Mask(split.prefill)
                self._handles[level] = Handles(
                    decode, self._prefill, len(split.decode), len(split.prefill), split.decode, split.prefill
                )
        except BaseException:
            self.close()
            raise

    def _make(self, priority: int) -> int:
        """A stream that gets a mask."""
        stream = self._streams.make(priority)
        self._masked.append(stream)
        return stream

    def handles(self, tpcs: int) -> Handles:
        self.prefill_on(tpcs)
        return self._handles[tpcs]

    def partition(self, tpcs: int) -> Partition:
        self.prefill_on(tpcs)
        if tpcs not in self._faces:
            self._faces[tpcs] = self._streams.faces(self._handles[tpcs])
        return self._faces[tpcs]

    def reserve(self, tpcs: int) -> Partition:
        self.prefill_on(tpcs)
        if tpcs not in self._reserved:
            total, rest = self.planner.topology.tpcs, self._handles[tpcs].prefill_tpcs
            self._reserved[tpcs] = self._streams.faces(Handles(self._everywhere, self._prefill, total, rest))
        return self._reserved[tpcs]

    def prefill_on(self, tpcs: int) -> None:
        """Keep what is launched on the prefill stream from now on off a level's decode TPCs.

        What was launched before keeps its mask. Raises ValueError for a count that is no level.
        """
        mask = self._prefill_masks.get(tpcs)
        if mask is None:
            self.planner.split(tpcs)
            raise ValueError(f"{tpcs} TPCs did not pass the self-test here: the levels on offer are {self.levels}")
        self._slot.apply(self._prefill, mask)

    def close(self) -> None:
        for kept in (self._prefill_masks, self._handles, self._faces, self._reserved):
            kept.clear()
        self.levels = ()
        # The driver may give a destroyed stream's memory to the next one, which nobody has masked.
        while self._masked:
            self._slot.clear(self._masked.pop())
        self._streams.close()
