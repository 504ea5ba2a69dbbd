"""Traces at several rates (``python -m bench.sweep --trace FILE --rates 4 8 12 --output FILE``).

For each system (stock SGLang by default and with mixed chunks; conflux in each mode, at each target) the first requests
of a trace are sent at their own times, scaled to a mean rate, with token ids of their own. Each point is appended to
the output with all of its figures under the names of the field's tools; what is there already is left out, so that a
sweep can go on after an interruption. One server start per stock setting, one for all of conflux's modes. Needs an
NVIDIA GPU, but for ``--quick``: that goes the whole way with a few requests to a tiny model on a CPU, to see that it
works; its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from bench.client import run_load
from bench.machine_facts import machine_facts
from bench.plan import make_plan
from bench.server import ServerError, ServerProcess
from bench.shapes import SHAPES
from bench.switched import conflux_state, set_mode, settle
from bench.systems import CONFLUX, ROOT, STOCK, add_arguments, measure_missing
from learner.traces import TraceRequest, at_rate, cap_lengths, poisson, read_trace
from sglang_ext.served import LoadResult

_GRACE_S = 30.0


class Point(NamedTuple):
    """What is measured at once. ``tbt_slo_ms`` is 0 for stock, which knows no target."""

    system: str
    trace: str
    rate: float
    tbt_slo_ms: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="Azure CSV or Mooncake JSON lines; --quick needs none")
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to append to")
    parser.add_argument("--systems", nargs="+", default=[*STOCK, *CONFLUX], help="default: all")
    parser.add_argument("--tbt-slo-ms", nargs="+", type=float, default=[25.0, 50.0, 100.0])
    parser.add_argument("--ttft-slo-ms", type=float, default=2000.0)
    parser.add_argument("--requests", type=int, default=300, help="of each point (default: 300)")
    parser.add_argument("--longest-input", type=int, default=32_000, help="longer prompts are left out")
    parser.add_argument("--longest-output", type=int, default=2_048, help="longer answers are cut")
    parser.add_argument("--share-blocks", action="store_true", help="equal block ids become equal tokens")
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "sweep", help="servers' logs and records")
    parser.add_argument("--until", type=float, default=420.0, help="start nothing after so many seconds")
    add_arguments(parser)
    parser.add_argument("--poisson", action="store_true", help="arrivals at random times; Mooncake's come in heaps")
    parser.add_argument("--quick", action="store_true", help="the whole way in small, without a GPU")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    given = parser.parse_args()
    if given.rates is None or (given.trace is None and not given.quick):
        parser.error("--trace and --rates are needed, or --quick")
    until_s = time.monotonic() + given.until
    report: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {"points": []}
    given.output.parent.mkdir(parents=True, exist_ok=True)

    trace = requests(given)

    def append(running: ServerProcess, point: Point) -> None:
        found = measure(running.url, point, trace, given)
        report["points"].append(found)
        report.update(machine=machine_facts(), command="python -m bench.sweep")
        given.output.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({key: found[key] for key in SHOWN}), flush=True)
        if not settle(running.url, within_s=60.0):
            raise ServerError("requests that were cut off are still running")

    return measure_missing(
        given, lambda systems: missing(report, systems, given), append, until_s, decode_graph_batch=256
    )


QUICK: dict[str, Any] = {
    "rates": [4.0, 8.0],
    "systems": ["stock", "stock-mixed-512", "conflux-auto"],
    "tbt_slo_ms": [100.0],
    "requests": 12,
    "model": "tiny",
}
SHOWN = (
    *("system", "rate", "tbt_slo_ms", "completed", "failed", "request_throughput", "mean_ttft_ms", "p99_ttft_ms"),
    *("p99_itl_ms", "max_itl_ms", "strict", "max_lateness_ms"),
)


def name_of(given: argparse.Namespace) -> str:
    """What the load is called in the report."""
    trace = given.trace.stem if given.trace is not None else "quick"
    return f"{trace}, poisson" if given.poisson else trace


def missing(report: dict[str, Any], systems: list[str], given: argparse.Namespace) -> list[Point]:
    """Points of these systems that the report lacks."""
    known = {(p["system"], p["trace"], p["rate"], p["tbt_slo_ms"], p["model"]) for p in report["points"]}
    asked = [
        Point(system, name_of(given), rate, target)
        for system in systems
        for target in (given.tbt_slo_ms if system in CONFLUX else [0.0])
        for rate in given.rates
    ]
    return [point for point in asked if (*point, given.model) not in known]


def measure(url: str, point: Point, trace: list[TraceRequest], given: argparse.Namespace) -> dict[str, Any]:
    """One point."""
    if point.system in CONFLUX:
        set_mode(url, CONFLUX[point.system], point.tbt_slo_ms)
    params = {"tbt_slo_ms": point.tbt_slo_ms} if point.tbt_slo_ms else {}
    scaled = at_rate(trace, point.rate)
    plan = make_plan(
        scaled,
        SHAPES[given.model]["vocab_size"],
        seed=int(1000 * point.rate),
        custom_params={**params, "ttft_slo_ms": given.ttft_slo_ms} if params else {},
        share_blocks=given.share_blocks,
    )
    loaded = run_load(url, plan, deadline_s=scaled[-1].arrival_s + _GRACE_S)
    state = conflux_state(url) if point.system in CONFLUX else None
    return {**point._asdict(), "model": given.model, **figures(loaded, point, given), "state": _short(state)}


def requests(given: argparse.Namespace) -> list[TraceRequest]:
    """The first requests of the trace that are short enough; without one a few of all kinds."""
    trace = read_trace(given.trace) if given.trace is not None else quick_trace(given.requests)
    trace = [request for request in trace if 0 < request.input_tokens <= given.longest_input]
    trace = poisson(trace[: given.requests]) if given.poisson else trace[: given.requests]
    return cap_lengths(trace, input_tokens=given.longest_input, output_tokens=given.longest_output)


def quick_trace(count: int) -> list[TraceRequest]:
    """Poisson arrivals, one a second; every fourth prompt is long."""
    rng, found = random.Random(0), []
    for number in range(count):
        prompt = rng.randint(1000, 1500) if number % 4 == 3 else rng.randint(20, 200)
        found.append(TraceRequest(0.0, prompt, rng.randint(8, 24)))
    return poisson(found)


def figures(loaded: LoadResult, point: Point, given: argparse.Namespace) -> dict[str, Any]:
    """The summary, and what was attained by each target, whichever was asked for: ``strict`` and, as in ConfluxServe,
    ``deadlines``."""
    ttft_slo_s = 1e-3 * given.ttft_slo_ms
    by_target = {
        f"{target:g}": loaded.summary(ttft_slo_s, 1e-3 * target)
        for target in sorted({*given.tbt_slo_ms, *([point.tbt_slo_ms] if point.tbt_slo_ms else [])})
    }
    own = by_target[f"{point.tbt_slo_ms or max(given.tbt_slo_ms):g}"]
    # The point's own target stands beside the figures already.
    rounded = {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in asdict(own).items()
        if key != "tbt_slo_ms"
    }
    return rounded | {
        "strict": {target: round(of.slo_attainment, 4) for target, of in by_target.items()},
        "deadlines": {target: round(of.deadline_attainment, 4) for target, of in by_target.items()},
    }


def _short(state: dict[str, Any] | None) -> dict[str, Any] | None:
    kept = ("decisions", "fallbacks", "decision_ms", "host_ms", "launch_ms", "host_period_ms", "window_yield")
    return None if state is None else {key: state[key] for key in kept}


if __name__ == "__main__":
    sys.exit(main())
