"""What conflux costs where there is nothing to share (``python -m bench.light_load --output FILE``).

Stock SGLang and conflux serve side by side on one GPU, each idle while the other is measured: bursts of one and of
sixteen equal requests, in turns. Reported are TTFT and TPOT of both, the mean of the paired differences with its 95 %
interval, and each server's start-up time and GPU memory. The first server ever started on a machine compiles kernels
for minutes, whichever it is: start one before. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.client import replay
from bench.machine_facts import machine_facts
from bench.plan import PlannedRequest
from bench.server import ServerProcess
from bench.shapes import SHAPES, gpu_args, shape_folder
from bench.switched import conflux_state

ROOT = Path(__file__).resolve().parent.parent
PROMPT, OUTPUT, BURSTS, POOL = 1024, 128, (1, 16), 100_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=40, help="pairs of each burst (default: 40)")
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--until", type=float, default=420.0, help="end after about so many seconds")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "light_load")
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    # Both get the same KV pool: the second server finds less memory free.
    args = [*gpu_args(shape_folder(given.model, given.logs), memory=0.4), "--max-total-tokens", str(POOL)]
    conflux = [*args, "--backend", "conflux", "--conflux-state-dir", str(given.logs / "state")]
    report: dict[str, Any] = {"command": "python -m bench.light_load", "machine": machine_facts(), "starts": {}}
    with (
        Started("stock", args, given.logs, report) as stock,
        Started("conflux", conflux, given.logs, report) as other,
    ):
        urls = {"stock": stock.url, "conflux": other.url}
        for burst in BURSTS:
            pairs = []
            for repeat in range(3 + given.repeats):
                if time.monotonic() - begin_s > given.until:
                    break
                order = list(urls) if repeat % 2 else list(urls)[::-1]
                times = {name: uvloop.run(_burst(urls[name], burst, given.model, (burst, repeat))) for name in order}
                if repeat >= 3:
                    pairs.append(times)
            report[f"burst of {burst}"] = compare(pairs) if pairs else "no time was left"
            print(f"burst of {burst}", json.dumps(report[f"burst of {burst}"]), flush=True)
        state = conflux_state(other.url)
        report["state"] = {key: state[key] for key in ("decisions", "lanes", "host_overhead_ms", "launch_ms")}
        given.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


class Started(ServerProcess):
    """A server whose start-up time and memory are noted."""

    def __init__(self, name: str, args: list[str], logs: Path, report: dict[str, Any]) -> None:
        super().__init__(args, log=logs / f"{name}.log", cwd=ROOT, startup_timeout_s=300.0)
        self._name, self._report = name, report

    def __enter__(self) -> Started:
        before, begin_s = _used_mib(), time.monotonic()
        super().__enter__()
        taken = {"seconds": round(time.monotonic() - begin_s, 1), "gpu_memory_mib": _used_mib() - before}
        self._report["starts"][self._name] = taken
        print(self._name, taken, flush=True)
        return self


def _used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    return int(out.stdout.split()[0])


async def _burst(url: str, burst: int, model: str, seed: object) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) in milliseconds."""
    rng, ids = random.Random(f"{url}{seed}"), range(256, SHAPES[model]["vocab_size"])
    plan = [PlannedRequest(0.0, rng.choices(ids, k=PROMPT), OUTPUT) for _ in range(burst)]
    loaded = await replay(url, plan, deadline_s=60.0)
    ttfts_s = [request.ttft_s for request in loaded.requests if request.ttft_s is not None]
    tpots_s = [request.tpot_s for request in loaded.requests if request.tpot_s is not None]
    return 1e3 * statistics.mean(ttfts_s), 1e3 * statistics.mean(tpots_s)


def compare(pairs: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Means of both, and of conflux / stock − 1 with the half-width of its 95 % interval, in per cent."""
    found: dict[str, Any] = {"pairs": len(pairs)}
    for at, name in enumerate(("ttft", "tpot")):
        stock, conflux = ([pair[system][at] for pair in pairs] for system in ("stock", "conflux"))
        change = [100.0 * (b / a - 1.0) for a, b in zip(stock, conflux, strict=True)]
        half = 1.96 * statistics.stdev(change) / math.sqrt(len(change)) if len(change) > 1 else float("inf")
        found |= {
            f"stock_mean_{name}_ms": round(statistics.mean(stock), 3),
            f"conflux_mean_{name}_ms": round(statistics.mean(conflux), 3),
            f"{name}_change_pct": round(statistics.mean(change), 3),
            f"{name}_change_half_width_pct": round(half, 3),
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
