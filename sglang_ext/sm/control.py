"""What a way of SM control offers: two streams whose kernels run on disjoint TPCs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Kind = Literal["none", "smctrl", "green"]


@dataclasses.dataclass(frozen=True, slots=True)
class Handles:
    """The driver's handles of a partition's streams, and the TPCs that their kernels may run on.

    ``decode`` and ``prefill`` are what ``torch.cuda.ExternalStream`` takes. The ids are None where the driver chose
    the TPCs (green contexts); the counts are always known.
    """

    decode: int
    prefill: int
    decode_tpcs: int
    prefill_tpcs: int
    decode_ids: tuple[int, ...] | None = None
    prefill_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """Streams of the two sides and how many TPCs each has. Decode's has the greatest priority, prefill's the least."""

    decode: torch.cuda.Stream
    prefill: torch.cuda.Stream
    decode_tpcs: int
    prefill_tpcs: int


class SmControl(Protocol):
    """One way of SM control on one GPU.

    ``levels``: the numbers of TPCs that decode may be given or prefill kept off, ascending; empty for ``none``.
    The streams belong to the control and live until :meth:`close`; no other part of the process runs on them.
    A CUDA graph keeps the TPCs of its capture, so decode graphs belong to the level whose stream captured them.
    """

    kind: Kind
    levels: tuple[int, ...]

    def partition(self, tpcs: int) -> Partition:
        """Disjoint sides, decode on ``tpcs`` TPCs and prefill on the others.

        What is launched on the prefill stream runs as the last call of ``partition`` or :meth:`reserve` said: call it
        before the launches of each iteration, on the thread that launches. Raises ValueError for a count that is no
        level.
        """

    def reserve(self, tpcs: int) -> Partition:
        """Decode on all TPCs, prefill kept off ``tpcs`` of them; else like :meth:`partition`."""

    def handles(self, tpcs: int) -> Handles:
        """:meth:`partition`, by the driver's handles."""

    def close(self) -> None:
        """Destroy the streams. Nothing may be running on them; a second call does nothing."""


class NoControl:
    """A device whose TPCs cannot be divided, or whose user does not want it."""

    kind: Kind = "none"
    levels: tuple[int, ...] = ()

    def partition(self, tpcs: int) -> Partition:
        raise ValueError("there is no SM control here, so there are no partitions; see `conflux doctor`")

    def reserve(self, tpcs: int) -> Partition:
        return self.partition(tpcs)

    def handles(self, tpcs: int) -> Handles:
        raise ValueError("there is no SM control here, so there are no partitions; see `conflux doctor`")

    def close(self) -> None:
        pass


class Streams:
    """A control's own streams on one device, and their PyTorch faces.

    They are made through the driver, never taken from PyTorch: its streams come from a pool that the whole process
    shares, so a mask on one would slow down somebody else.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.least_priority, self.greatest_priority = device.stream_priorities()
        self._made: list[int] = []
        self._wrapped: dict[int, torch.cuda.Stream] = {}

    def make(self, priority: int) -> int:
        handle = int(self.device.create_stream(priority))
        self._made.append(handle)
        return handle

    def wrap(self, handle: int) -> torch.cuda.Stream:
        if handle not in self._wrapped:
            import torch

            external: Any = torch.cuda.ExternalStream
            self._wrapped[handle] = external(handle, device=self.device.ordinal)
        return self._wrapped[handle]

    def faces(self, handles: Handles) -> Partition:
        decode, prefill = self.wrap(handles.decode), self.wrap(handles.prefill)
        return Partition(decode, prefill, handles.decode_tpcs, handles.prefill_tpcs)

    def close(self) -> None:
        self._wrapped.clear()
        while self._made:
            self.device.destroy_stream(self._made.pop())
