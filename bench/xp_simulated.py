"""Goodput of several GPUs on simulated time (``python -m bench.xp_simulated --trace FILE --output FILE``).

For each system the highest arrival rate at which 95 % of a trace's requests attain the targets, by bisection; twice:
every token by its deadline (ConfluxServe's goodput), and first token in time with 99 % of the own gaps within the
target. Nothing runs on a device: forwards take what the latency model predicts, from the shipped prior.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.machine_facts import machine_facts
from bench.shapes import SHAPES, shape_folder
from learner.device import DeviceProfile
from learner.latency import LatencyModel
from learner.prior import cold_snapshot
from learner.shape import ModelShape
from learner.traces import TraceRequest, at_rate, cap_lengths, poisson, read_trace
from sglang_ext.served import Summary
from sglang_ext.simulate.host import HostTimes
from sglang_ext.simulate.xp import serve_on

ATTAINED, STEPS = 0.95, 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Azure CSV or Mooncake JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to add to")
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-14B")
    parser.add_argument("--device", default="h200", help="a shipped profile (default: h200)")
    parser.add_argument("--gpus", type=int, nargs="*", default=[4])
    parser.add_argument("--systems", nargs="*", default=["stock-mixed-2048/tp", "stock-mixed-2048/dp", "stock/tp",
                        "stock/dp", "conflux-auto/dp", "conflux-xp"], help="without the number of GPUs")  # fmt: skip
    parser.add_argument("--poisson", action="store_true", help="arrivals at random times (Mooncake's come in heaps)")
    parser.add_argument("--limit", type=int, default=300, help="requests (default: 300)")
    parser.add_argument("--ttft-slo-ms", type=float, default=2000.0)
    parser.add_argument("--tbt-slo-ms", type=float, default=100.0)
    parser.add_argument("--kv-tokens", type=int, default=500_000, help="KV slots of each GPU")
    given = parser.parse_args()
    report: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {"points": []}
    report |= {"command": "python -m bench.xp_simulated", "machine": machine_facts(), "simulated": True}
    with TemporaryDirectory() as folder:
        config = json.loads((shape_folder(given.model, Path(folder)) / "config.json").read_text())
    profile = DeviceProfile.shipped(given.device)
    shape = ModelShape.from_hf_config(config, name=given.model, dtype="bfloat16")
    model = LatencyModel(shape, profile, cold_snapshot(profile))
    trace = cap_lengths(read_trace(given.trace, given.limit), input_tokens=32_000, output_tokens=4_096)
    trace = [request for request in trace if request.input_tokens > 0]
    if given.poisson:
        trace = poisson(trace)
    for gpus in given.gpus:
        for system in given.systems:
            found = goodput(f"{system}{gpus}", trace, model, given)
            report["points"].append(
                {
                    "trace": given.trace.name,
                    "poisson": given.poisson,
                    "requests": len(trace),
                    "model": given.model,
                    **found,
                }
            )
            print(json.dumps(report["points"][-1]), flush=True)
            given.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def goodput(name: str, trace: list[TraceRequest], model: LatencyModel, given: argparse.Namespace) -> dict[str, Any]:
    """Both goodputs of one system, in requests a second."""

    @cache
    def summary(rate: float) -> Summary:
        result, _ = serve_on(
            name,
            at_rate(trace, rate),
            model,
            tbt_slo_s=given.tbt_slo_ms / 1e3,
            ttft_slo_s=given.ttft_slo_ms / 1e3,
            host=HostTimes(),
            kv_tokens=given.kv_tokens,
        )
        return result.summary(given.ttft_slo_ms / 1e3, given.tbt_slo_ms / 1e3)

    found = {}
    for kind in ("deadline_attainment", "slo_attainment"):
        low, high = 0.125, 0.25
        while high < 256.0 and getattr(summary(high), kind) >= ATTAINED:
            low, high = high, 2.0 * high
        for _ in range(STEPS - 2):
            middle = (low + high) / 2.0
            if getattr(summary(middle), kind) >= ATTAINED:
                low = middle
            else:
                high = middle
        found[kind.replace("attainment", "goodput")] = round(low, 3)
    return {"system": name, **found}


if __name__ == "__main__":
    sys.exit(main())
