"""As much of PyTorch as the measuring child asks for, on a GPU whose driver is a stand-in. Matrices hold nothing.

A GEMM takes a millisecond of an invented clock, or for ever where ``LIGHT_HANG_BELOW_SMS`` says so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

__version__ = "9.9.9+light"
version = SimpleNamespace(cuda="13.0")
bfloat16, uint8 = "bfloat16", "uint8"
SMS = 32


class Matrix:
    def __init__(self, *shape: int, **kind: Any) -> None:
        self.shape = shape

    def t(self) -> Matrix:
        return Matrix(*reversed(self.shape))


randn = empty = ones = Matrix
_clock_ms = 0.0
_stuck = False


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.cuda_stream = 0


class ExternalStream(Stream):
    def __init__(self, handle: int, device: Any = None) -> None:
        self.cuda_stream = handle


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        self.at_ms = _clock_ms

    def query(self) -> bool:
        return not _stuck

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


_running_on = Stream()


def mm(a: Matrix, b: Matrix, out: Matrix) -> None:
    """Checks shapes as the real one does."""
    global _clock_ms, _stuck
    assert (a.shape[1], out.shape) == (b.shape[0], (a.shape[0], b.shape[1]))
    _clock_ms += 1.0
    _stuck = _stuck or _sms() < int(os.environ.get("LIGHT_HANG_BELOW_SMS", "0"))


def _sms() -> int:
    """SMs that the current stream has, which the mask in the stand-in's stream says."""
    import conflux_native

    handle = _running_on.cuda_stream
    mask = conflux_native.MaskSlot(0x51C).read(handle) if handle > 2 else None
    return SMS if mask is None else 2 * len(mask)


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    global _running_on
    before, _running_on = _running_on, stream
    yield
    _running_on = before


def device(kind: str, ordinal: int) -> str:
    return f"{kind}:{ordinal}"


def get_num_threads() -> int:
    return 1


cuda = SimpleNamespace(
    Stream=Stream,
    ExternalStream=ExternalStream,
    Event=Event,
    stream=_on,
    current_stream=lambda: _running_on,
    is_available=lambda: True,
    device_count=lambda: 1,
    set_device=lambda where: None,
    synchronize=lambda: None,
    mem_get_info=lambda where: (8 << 30, 16 << 30),
    memory_reserved=lambda where: 1 << 30,
    get_device_name=lambda where: "Light GPU",
    get_device_properties=lambda where: SimpleNamespace(multi_processor_count=SMS),
)
nn = SimpleNamespace(functional=SimpleNamespace(linear=lambda vector, matrix: None))
