"""The self-test with GEMMs on the CPU, for a driver that is a stand-in; as a script, the child that runs it.

``ON_CPU_HANG`` in the environment, as ``8,16:1024x2048``, names levels and a shape whose GEMM never ends on decode's
stream there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

import torch

from sglang_ext.sm import checks, self_test


class OnCpu(checks.Gemms):
    """``hang`` is called in place of a GEMM's end: with its stream and shape, before the GEMM."""

    def __init__(self, ordinal: int, shapes: checks.Shapes = checks.SHAPES) -> None:
        self.stream = 0
        self._prepare(torch.device("cpu"), shapes)

    def launched(self, stream: int, shape: tuple[int, int]) -> None:
        pass

    @contextlib.contextmanager
    def _on(self, stream: int) -> Any:
        self.stream = stream
        yield
        self.stream = 0

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.stream:
            self.launched(self.stream, (weight.shape[1], weight.shape[0]))
        return super()._linear(x, weight)


class Hanging(OnCpu):
    """As ``ON_CPU_HANG`` says."""

    def check(self, device: Any, handles: Any, timeout_s: float) -> None:
        self.device, self.handles = device, handles
        super().check(device, handles, timeout_s)

    def launched(self, stream: int, shape: tuple[int, int]) -> None:
        levels, _, hanging = os.environ["ON_CPU_HANG"].partition(":")
        if (
            stream == self.handles.decode
            and self.handles.decode_tpcs in map(int, levels.split(","))
            and shape in checks.parse_shapes(hanging)
        ):
            (driver,) = (part.partition("=")[2] for part in sys.argv if part.startswith("--driver="))
            ctypes.CDLL(driver).stand_in_set(b"HANG_KERNELS", b"all")
            self.device.launch_spin(stream, 1, 1)


if __name__ == "__main__":
    self_test.Gemms = Hanging  # type: ignore[misc]
    self_test.main()
