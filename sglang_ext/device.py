"""Which device curves a scheduler starts with: calibrated on this machine, shipped, or measured now.

PyTorch is imported by what measures, not by what looks up.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import time
from calendar import timegm
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from learner.device import DeviceProfile, shipped_names

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CALIBRATED = "conflux calibrate"  # provenance["source"] of a profile that this command wrote
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

# (m, k, n) of GEMMs like those of small and large prefills, for a CPU and for a GPU.
CPU_GEMM_SHAPES = ((64, 576, 1536), (256, 1024, 1024), (512, 2048, 2048))
GPU_GEMM_SHAPES = ((8192, 4096, 4096), (2048, 4096, 12288), (4096, 4096, 4096))
PCIE_BANDWIDTH = 25e9
_SECONDS_PER_SHAPE = 0.15
# Larger than any last-level cache.
_CPU_READ_BYTES = 64 << 20
_GPU_READ_BYTES = 1 << 30

Source = Literal["calibrated", "shipped", "measured"]


class Choice(NamedTuple):
    """A profile for a device, where it is from, and the file or the shipped name that holds it."""

    profile: DeviceProfile
    source: Source
    origin: str


def device_profile(device: str, dtype: str, state_dir: str) -> DeviceProfile:
    """The profile for ``device`` ("cpu" or "cuda") computing in ``dtype`` (as "bfloat16").

    If :func:`find_profile` knows none, the whole device is measured, and that is kept and used from then on.
    """
    name, tpcs = (cpu_name(dtype), 1) if device == "cpu" else _gpu()
    found = find_profile(name, tpcs, state_dir)
    if found is not None:
        logger.info("conflux: %s curves of %s (%s)", found.source, name, found.origin)
        return found.profile
    profile = measure(device, dtype, name)
    path = profile_path(state_dir, name)
    try:
        profile.save(path)
    except OSError as error:
        logger.warning("conflux: the device's curves could not be kept in %s: %s", path, error)
    return profile


def find_profile(name: str, tpcs: int, state_dir: str | os.PathLike[str]) -> Choice | None:
    """The best profile that there is for a device of this name and size, or None.

    Calibrated on this machine comes before shipped, shipped before measured at an earlier start (the whole device
    alone). A file that cannot be used is named in a warning and passed over.
    """
    kept = _kept(name, tpcs, profile_path(state_dir, name))
    if kept is not None and kept.source == "calibrated":
        return kept
    shipped = shipped_profile(name, tpcs)
    return kept if shipped is None else Choice(shipped, "shipped", shipped.name)


def shipped_profile(name: str, tpcs: int) -> DeviceProfile | None:
    """The profile that comes with the package for GPUs of this name and size, or None."""
    for stem in shipped_names():
        profile = DeviceProfile.shipped(stem)
        # "NVIDIA H200 NVL" is an H200, "NVIDIA GH200" is not, and a slice of one has fewer TPCs.
        if tpcs == profile.tpcs and f"{name} ".startswith(f"{profile.name} "):
            return profile
    return None


def profile_path(state_dir: str | os.PathLike[str], name: str) -> Path:
    """Where the profile of the device ``name`` is kept."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:60]
    return Path(state_dir) / "devices" / f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def measured_unix_s(profile: DeviceProfile) -> float | None:
    """When a profile was measured, if its provenance says so."""
    try:
        return float(timegm(time.strptime(profile.provenance.get("measured", ""), TIME_FORMAT)))
    except ValueError:
        return None


def _kept(name: str, tpcs: int, path: Path) -> Choice | None:
    if not path.exists():
        return None
    try:
        profile = DeviceProfile.load(path)
    except (OSError, ValueError) as error:
        logger.warning("conflux: %s cannot be used (%s)", path, error)
        return None
    if profile.tpcs != tpcs or profile.link_bandwidth <= 0:
        logger.warning("conflux: %s is not used: it does not describe %s with %d TPCs and a link", path, name, tpcs)
        return None
    source: Source = "calibrated" if profile.provenance.get("source") == CALIBRATED else "measured"
    return Choice(profile, source, str(path))


def _gpu() -> tuple[str, int]:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return torch.cuda.get_device_name(), max(properties.multi_processor_count // 2, 1)


def measure(device: str, dtype: str, name: str) -> DeviceProfile:
    """Π and 𝓑 of the whole device, with the threads and the dtype that serving uses. Takes about a second."""
    import torch

    kind = getattr(torch, dtype)
    shapes = CPU_GEMM_SHAPES if device == "cpu" else GPU_GEMM_SHAPES
    flops = max(_gemm_flops(device, kind, *shape) for shape in shapes)
    bandwidth = _read_bandwidth(device, kind)
    tpcs = 1 if device == "cpu" else _gpu()[1]
    logger.info("conflux: measured %s: %.4g GFLOP/s, %.4g GB/s", name, flops / 1e9, bandwidth / 1e9)
    return DeviceProfile(
        name=name,
        tpcs=tpcs,
        flops=((float(tpcs), flops),),
        bandwidth=((float(tpcs), bandwidth),),
        # Ranks on CPUs exchange through memory; between GPUs PCIe 4.0 is assumed until it is measured.
        link_bandwidth=bandwidth if device == "cpu" else PCIE_BANDWIDTH,
        provenance={
            "measured": time.strftime(TIME_FORMAT, time.gmtime()),
            "method": "best of several GEMM shapes; reading a matrix in a GEMV; whole device",
            "torch": str(torch.__version__),
            "threads": str(torch.get_num_threads()) if device == "cpu" else "",
            "dtype": dtype,
        },
    )


def cpu_name(dtype: str, threads: int | None = None) -> str:
    """Processor, threads and dtype: what a CPU's curves depend on. ``threads``: PyTorch's unless given."""
    if threads is None:
        import torch

        threads = torch.get_num_threads()
    model = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = found.group(1) if found else model
    except OSError:
        pass
    return f"CPU {model} x{threads} {dtype}"


def _gemm_flops(device: str, kind: torch.dtype, m: int, k: int, n: int) -> float:
    import torch

    own = torch.Generator(device)  # the global one's seed is the user's
    a, b = (torch.randn(rows, k, device=device, generator=own).to(kind) for rows in (m, n))
    return 2.0 * m * k * n / _fastest(device, lambda: torch.nn.functional.linear(a, b))


def _read_bandwidth(device: str, kind: torch.dtype) -> float:
    import torch

    columns = 2048
    rows = (_CPU_READ_BYTES if device == "cpu" else _GPU_READ_BYTES) // (columns * kind.itemsize)
    matrix, vector = (
        torch.ones(rows, columns, dtype=kind, device=device),
        torch.ones(1, columns, dtype=kind, device=device),
    )
    return rows * columns * kind.itemsize / _fastest(device, lambda: torch.nn.functional.linear(vector, matrix))


def _fastest(device: str, run: Callable[[], Any]) -> float:
    """Shortest of repeated runs, in seconds: interference only ever adds."""
    import torch

    run()
    best, deadline = float("inf"), time.perf_counter() + _SECONDS_PER_SHAPE
    while True:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        best = min(best, now - begin)
        if now > deadline:
            return best
