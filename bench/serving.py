"""The server arguments that the demo and ``make serve`` share."""

from __future__ import annotations

from pathlib import Path

from bench.model import NAME
from sglang_ext.cpu import serves_on_cpu

CPU_TBT_SLO_MS = 400
CPU_TTFT_SLO_MS = 5000


def server_args(model: Path, *, record: Path | None = None, mode: str = "auto") -> list[str]:
    """Arguments of ``sglang.launch_server`` for the demo model on this machine, besides host and port.

    On a CPU the targets are such as it can keep, and the precision is the one in which it prefills fastest.
    """
    args = ["--model-path", str(model), "--served-model-name", NAME, "--backend", "conflux", "--enable-metrics"]
    args += ["--conflux-mode", mode]
    if serves_on_cpu():
        args += ["--dtype", "float32"]
        args += ["--conflux-tbt-slo-ms", str(CPU_TBT_SLO_MS), "--conflux-ttft-slo-ms", str(CPU_TTFT_SLO_MS)]
    if record is not None:
        args += ["--conflux-record", str(record)]
    return args
