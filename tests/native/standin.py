"""Builds the stand-in for libcuda and sets what it is like.

Settings are given to a library that this process has loaded by `StandIn.set`, and to child processes by the environment
that `StandIn.environment` returns; both take the same names:

=================  ====================================================================================================
VERSION            what cuDriverGetVersion says (13000)
DEVICES, NAME      number of GPUs (1), their name
CAPABILITY         compute capability, 90 for 9.0
TPCS               TPCs of the GPU (66); SMs are twice as many
GPCS               its GPCs as "0,1,2;3,4": TPC ids; the H200's recorded map by default
MEMORY_GIB         memory of the GPU (139)
OFFSET             where in a stream's structure the mask is (0x51c); -1: nowhere
SHARED_OFFSET      a place that acts like a mask on all streams at once
CRASH, HANG,       offsets ("0x10,0x20-0x30", "all") of words which, when something else stands there than in a fresh
ERROR              stream, abort the process, hang the stream, or break the context with CUDA_ERROR_ILLEGAL_ADDRESS, at
                   the next launch
POINTERS           "crash", "hang" or "error": the same for all words that are not zero in a fresh stream
HANG_KERNELS       kernels that never finish ("conflux_smid,conflux_cluster", "all")
HANG_BELOW_TPCS    launches on fewer TPCs than that never finish
RELEASE            1: whatever hangs or runs counts as finished
FAIL               "cuInit=100,cuStreamQuery=700@3": the code that a symbol returns, @n: from its n-th call on
GREEN_LEAST,       granularity of green contexts in SMs (8 and 8)
GREEN_STEP
=================  ====================================================================================================

A launch on a mask without room for one cluster never finishes, as on a real GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent.parent / "native" / "src"

# What CUDA 13.0 (driver 580) does not have yet.
SINCE_13_1 = ("cuDevSmResourceSplit",)
GREEN = (
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevSmResourceSplit",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
)


@functools.cache
def objects() -> tuple[str, ...]:
    """The stand-in, compiled but not linked."""
    folder = tempfile.TemporaryDirectory(prefix="conflux-stand-in-")
    atexit.register(folder.cleanup)
    found = []
    for source in ("libcuda.cpp", "green.cpp"):
        found.append(str(Path(folder.name) / f"{source}.o"))
        command = [compiler(), "-std=c++17", "-fPIC", f"-I{SOURCES}", "-c", str(HERE / "stand_in" / source)]
        subprocess.run([*command, "-o", found[-1]], check=True)
    return tuple(found)


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def build(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """Makes a stand-in that lacks the symbols ``without`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    hidden = folder / "hidden.map"
    local = "; ".join((*without, "no_such_symbol"))
    hidden.write_text(f"{{ global: *; local: {local}; }};\n")
    command = [compiler(), "-shared", f"-Wl,--version-script={hidden}", *objects(), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


class StandIn:
    """One stand-in library, loaded into this process too."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)

    def set(self, **settings: object) -> None:
        """Changes settings of the library in this process; None takes one back."""
        for name, value in settings.items():
            self.library.stand_in_set(name.encode(), None if value is None else str(value).encode())

    def environment(self, **settings: object) -> dict[str, str]:
        """This process's environment with settings for a child."""
        return {**os.environ, **{f"STAND_IN_{name}": str(value) for name, value in settings.items()}}

    def reset(self) -> None:
        self.library.stand_in_reset()

    def calls(self, symbol: str) -> int:
        """How often a symbol has been called since the last reset."""
        return int(self.library.stand_in_calls(symbol.encode()))

    def live(self, kind: str) -> int:
        """How many "streams", "memory", "host", "events", "contexts", "green" are held, relative to the last reset."""
        return int(self.library.stand_in_live(kind.encode()))

    def context_depth(self) -> int:
        """Contexts on this thread's stack."""
        return int(self.library.stand_in_context_depth())

    def priority(self, stream: int) -> int:
        """The priority that a stream was made with."""
        self.library.stand_in_priority.argtypes = [ctypes.c_void_p]
        return int(self.library.stand_in_priority(stream))
