"""What kind of machine this is, found without importing torch or opening a driver."""

from __future__ import annotations

import os
from pathlib import Path

# Device nodes of NVIDIA (bare and under WSL), AMD and Ascend accelerators.
ACCELERATOR_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/dev/davinci0")


def has_accelerator(nodes: tuple[str, ...] = ACCELERATOR_NODES) -> bool:
    """Whether an accelerator that SGLang could use is visible. ``CUDA_VISIBLE_DEVICES`` empty or -1 hides it.

    Only device nodes are looked at: initialising a driver here would take long and break processes forked later.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(Path(node).exists() for node in nodes)


def available_memory_bytes() -> int:
    """Memory that can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
