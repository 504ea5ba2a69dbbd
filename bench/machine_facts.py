"""What a result was measured on: GPU, driver and versions."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

_PACKAGES = ("sglang-conflux", "sglang", "torch", "scikit-learn", "numpy")


def machine_facts() -> dict[str, Any]:
    """Plain values; what cannot be found is left out. Asks nvidia-smi, so that no CUDA context is made."""
    facts: dict[str, Any] = {
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "processor": _processor(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return facts
    if out.returncode == 0 and out.stdout.strip():
        lines = [line.rsplit(", ", 1) for line in out.stdout.strip().splitlines()]
        facts |= {"gpus": [line[0] for line in lines], "driver": lines[0][1]}
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
