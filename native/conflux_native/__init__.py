"""Puts CUDA streams on chosen SMs: stream masks, green contexts, and probes that show where blocks really run.

Needs nothing but the standard library. The NVIDIA driver is loaded when a `Driver` is made, so this imports anywhere;
where the C++ extension was not built, `AVAILABLE` is False, `WHY_NOT` says why, and its classes cannot be imported.

Example::

    from conflux_native import Device, Driver, Mask, MaskSlot

    device = Device(Driver())
    stream = device.create_stream()                 # for torch.cuda.ExternalStream(stream)
    slot = MaskSlot(found.offset)                   # an offset that was verified: see conflux_native.search
    slot.apply(stream, Mask([0, 1, 2, 3]))          # kernels launched from now on run on TPCs 0 to 3
    assert set(device.smid_histogram(stream)[8:]) == {0}
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import CudaError, DeviceStuck, DriverMissing

if TYPE_CHECKING:
    from ._core import Device, Driver, GreenPartition, Mask, MaskSlot, green_granularity

AVAILABLE: bool
WHY_NOT: str

try:
    from . import _core
except ImportError as error:
    AVAILABLE = False
    try:
        # Written at installation, where the extension could not be built.
        reason = import_module(f"{__name__}._not_built").REASON
    except ImportError:
        reason = str(error)
    WHY_NOT = f"conflux_native has no extension: {reason}"
else:
    AVAILABLE = True
    WHY_NOT = ""

__all__ = [
    "AVAILABLE",
    "WHY_NOT",
    "CudaError",
    "Device",
    "DeviceStuck",
    "Driver",
    "DriverMissing",
    "GreenPartition",
    "Mask",
    "MaskSlot",
    "green_granularity",
]


def __getattr__(name: str) -> object:
    if name in ("Device", "Driver", "GreenPartition", "Mask", "MaskSlot", "green_granularity"):
        if not AVAILABLE:
            raise ImportError(WHY_NOT)
        return getattr(_core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
