"""Which device curves a scheduler starts with: shipped, calibrated earlier on this machine, or measured now."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import time
from pathlib import Path

import torch

from learner.device import DeviceProfile

logger = logging.getLogger(__name__)

_SECONDS_PER_SHAPE = 0.15
# (m, k, n) of GEMMs like those of small and large prefills.
_GEMM_SHAPES = ((64, 576, 1536), (256, 1024, 1024), (512, 2048, 2048))
_PCIE_BANDWIDTH = 25e9
_READ_BYTES = 64 << 20  # larger than a last-level cache


def device_profile(device: str, dtype: str, state_dir: str) -> DeviceProfile:
    """The profile for ``device`` ("cpu" or "cuda") computing in ``dtype`` (as "bfloat16").

    A measured profile is kept under ``state_dir/devices`` and used from then on.
    """
    name = cpu_name(dtype) if device == "cpu" else torch.cuda.get_device_name()
    if device == "cuda" and "H200" in name:
        return DeviceProfile.shipped("h200")
    path = Path(state_dir) / "devices" / f"{_slug(name)}.json"
    if path.exists():
        try:
            profile = DeviceProfile.load(path)
            if profile.link_bandwidth > 0:
                return profile
        except (OSError, ValueError) as error:
            logger.warning("conflux: %s cannot be used (%s); measuring this device anew", path, error)
    profile = measure(device, dtype, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        profile.save(scratch)
        scratch.replace(path)
    except OSError as error:
        logger.warning("conflux: the device's curves could not be kept in %s: %s", path, error)
    return profile


def measure(device: str, dtype: str, name: str) -> DeviceProfile:
    """Π and 𝓑 of the whole device, with the threads and the dtype that serving uses. Takes about a second."""
    kind = getattr(torch, dtype)
    flops = max(_gemm_flops(device, kind, *shape) for shape in _GEMM_SHAPES)
    bandwidth = _read_bandwidth(device, kind)
    tpcs = 1
    if device == "cuda":
        tpcs = max(torch.cuda.get_device_properties(0).multi_processor_count // 2, 1)
    logger.info("conflux: measured %s: %.4g GFLOP/s, %.4g GB/s", name, flops / 1e9, bandwidth / 1e9)
    return DeviceProfile(
        name=name,
        tpcs=tpcs,
        flops=((float(tpcs), flops),),
        bandwidth=((float(tpcs), bandwidth),),
        # Ranks on CPUs exchange through memory; between GPUs PCIe 4.0 is assumed until it is measured.
        link_bandwidth=bandwidth if device == "cpu" else _PCIE_BANDWIDTH,
        provenance={
            "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "method": "best of several GEMM shapes; reading a matrix in a GEMV; whole device",
            "torch": str(torch.__version__),
            "threads": str(torch.get_num_threads()) if device == "cpu" else "",
            "dtype": dtype,
        },
    )


def cpu_name(dtype: str) -> str:
    """Processor, threads and dtype: what a CPU's curves depend on."""
    model = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = found.group(1) if found else model
    except OSError:
        pass
    return f"CPU {model} x{torch.get_num_threads()} {dtype}"


def _gemm_flops(device: str, kind: torch.dtype, m: int, k: int, n: int) -> float:
    a, b = torch.randn(m, k, device=device).to(kind), torch.randn(n, k, device=device).to(kind)
    return 2.0 * m * k * n / _fastest(device, lambda: torch.nn.functional.linear(a, b))


def _read_bandwidth(device: str, kind: torch.dtype) -> float:
    columns = 2048
    rows = _READ_BYTES // (columns * kind.itemsize)
    matrix, vector = (
        torch.ones(rows, columns, dtype=kind, device=device),
        torch.ones(1, columns, dtype=kind, device=device),
    )
    return rows * columns * kind.itemsize / _fastest(device, lambda: torch.nn.functional.linear(vector, matrix))


def _fastest(device: str, run) -> float:
    """Shortest of repeated runs, in seconds: interference only ever adds."""
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


def _slug(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:60]
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
