"""What can go wrong below: errors of the NVIDIA driver, and of its absence."""

from __future__ import annotations


class CudaError(RuntimeError):
    """A call of the CUDA driver failed.

    ``name`` is the driver's name of the error ("CUDA_ERROR_INVALID_VALUE"), ``code`` its number, ``function`` the call
    that returned it ("cuInit").
    """

    def __init__(self, message: str, name: str, code: int, function: str) -> None:
        super().__init__(message, name, code, function)
        self.name = name
        self.code = code
        self.function = function

    def __str__(self) -> str:
        return str(self.args[0])


class DriverMissing(RuntimeError):  # noqa: N818 (a state of the machine, not a fault)
    """No NVIDIA driver, or one that lacks what was asked for; the message says which and what to do."""


class DeviceStuck(RuntimeError):  # noqa: N818
    """Work on the GPU did not finish in time earlier, so this process cannot use it any more."""
