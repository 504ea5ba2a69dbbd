"""Decodes beside long prompts (``python -m bench.interference --output FILE``).

Thirty-two requests decode at a context of about 2,000 tokens while a prompt of 8,192 tokens arrives every second. For
each system (stock SGLang by default and with mixed chunks; conflux in each mode, at each target) the gaps between the
decodes' tokens, the long prompts' TTFT and the tokens per second are appended to the output; what it has already is
left out, so that a run can go on after an interruption. One server start per stock setting and one for all of
conflux's modes. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.client import replay
from bench.machine_facts import machine_facts
from bench.plan import PlannedRequest
from bench.server import ServerProcess
from bench.shapes import SHAPES
from bench.switched import conflux_state, set_mode, settle
from bench.systems import CONFLUX, ROOT, STOCK, add_arguments, measure_missing
from sglang_ext.served import LoadResult, quantile

DECODES, CONTEXT, LONG_PROMPT, LONG_EVERY_S = 32, 2048, 8192, 1.0
DECODES_FROM_S, LONG_FROM_S = 0.0, 2.0
Point = tuple[str, float]
"""System, target in ms; 0 for stock, which knows none."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to append to")
    parser.add_argument("--systems", nargs="*", default=[*STOCK, *CONFLUX], help="default: all")
    parser.add_argument("--tbt-slo-ms", nargs="*", type=float, default=[25.0, 50.0, 100.0])
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--seconds", type=float, default=12.0, help="measured, of each point (default: 12)")
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds of the same load before (default: 4)")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "interference", help="servers' logs and records")
    parser.add_argument("--until", type=float, default=480.0, help="start no server after so many seconds")
    add_arguments(parser)
    given = parser.parse_args()
    until_s = time.monotonic() + given.until
    report = _read(given.output)

    def append(running: ServerProcess, point: Point) -> None:
        found = measure(running.url, point, given)
        report["points"].append(found)
        _write(given.output, report, given)
        print(json.dumps({key: value for key, value in found.items() if key != "state"}), flush=True)

    return measure_missing(given, lambda systems: _missing(report, systems, given), append, until_s)


def measure(url: str, point: Point, given: argparse.Namespace) -> dict[str, Any]:
    """One point."""
    system, target = point
    if system in CONFLUX:
        set_mode(url, CONFLUX[system], target)
    loaded = uvloop.run(_load(url, target, given, seed=system))
    found = {
        "system": system,
        "tbt_slo_ms": target,
        **summary(loaded, LONG_FROM_S + given.warm_up, given.seconds, target),
        "state": _state(url) if system in CONFLUX else None,
    }
    settle(url)
    return found


async def _load(url: str, tbt_slo_ms: float, given: argparse.Namespace, seed: str) -> LoadResult:
    """The load; cut off when the measured time is over, which ends the decodes."""
    rng = random.Random(f"{tbt_slo_ms}:{seed}")
    vocabulary = SHAPES[given.model]["vocab_size"]
    length_s = LONG_FROM_S + given.warm_up + given.seconds
    params = {"tbt_slo_ms": tbt_slo_ms} if tbt_slo_ms else {}
    plan = [
        PlannedRequest(DECODES_FROM_S, rng.choices(range(256, vocabulary), k=CONTEXT), 16384, params)
        for _ in range(DECODES)
    ]
    plan += [
        PlannedRequest(LONG_FROM_S + at * LONG_EVERY_S, rng.choices(range(256, vocabulary), k=LONG_PROMPT), 8, params)
        for at in range(int((length_s - LONG_FROM_S) / LONG_EVERY_S))
    ]
    return await replay(url, plan, deadline_s=length_s)


def summary(loaded: LoadResult, from_s: float, seconds: float, tbt_slo_ms: float) -> dict[str, Any]:
    """What happened from ``from_s`` on for so many seconds: gaps that end, prompts that arrive or begin there."""
    decodes, prompts = loaded.requests[:DECODES], loaded.requests[DECODES:]
    until_s = from_s + seconds
    # Under load SGLang may put two tokens into one event.
    made = sum(
        now - then
        for request in decodes
        for at_s, then, now in zip(request.event_s, [0, *request.event_tokens], request.event_tokens, strict=False)
        if from_s <= at_s < until_s
    )
    gaps_ms = [
        1e3 * (late - early)
        for request in decodes
        for early, late in zip(request.event_s, request.event_s[1:], strict=False)
        if from_s <= late < until_s
    ]
    own = [request for request in prompts if from_s <= request.sent_s < until_s - LONG_EVERY_S]
    ttfts_ms = [1e3 * request.ttft_s for request in own if request.ttft_s is not None]
    begun = sum(bool(request.event_s) and from_s <= request.event_s[0] < until_s for request in prompts)
    answers = sum(from_s <= at_s < until_s for request in prompts for at_s in request.event_s)
    tokens = made + answers + begun * LONG_PROMPT
    return {
        "decode_tokens_per_s": round(made / seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
        **{f"{name}_itl_ms": round(quantile(gaps_ms, q), 2) for name, q in _QUANTILES.items()},
        "within_slo": round(sum(gap <= tbt_slo_ms for gap in gaps_ms) / max(len(gaps_ms), 1), 5)
        if tbt_slo_ms
        else None,
        "long_prompts": len(own),
        "long_unanswered": len(own) - len(ttfts_ms),
        "mean_long_ttft_ms": round(sum(ttfts_ms) / max(len(ttfts_ms), 1), 1),
        "max_long_ttft_ms": round(max(ttfts_ms), 1) if ttfts_ms else None,
        "decodes_alive": sum(bool(request.event_s) and request.event_s[-1] > until_s - 1.0 for request in decodes),
        "max_client_lag_ms": round(1e3 * loaded.max_client_lag_s, 1),
    }


_QUANTILES = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}


def _state(url: str) -> dict[str, Any]:
    state = conflux_state(url)
    left_out = ("device", "sm_control", "learner", "pool", "lanes", "concurrent")
    return {key: value for key, value in state.items() if key not in left_out}


def _missing(report: dict[str, Any], systems: list[str], given: argparse.Namespace) -> list[Point]:
    """Points of these systems that were not measured yet; stock knows no target."""
    known = {(point["system"], point["tbt_slo_ms"]) for point in report["points"]}
    asked = [(system, target) for system in systems for target in (given.tbt_slo_ms if system in CONFLUX else [0.0])]
    return [point for point in asked if point not in known]


def _read(path: Path) -> dict[str, Any]:
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"points": []}


def _write(path: Path, report: dict[str, Any], given: argparse.Namespace) -> None:
    report["machine"] = machine_facts()
    report["model"] = f"{given.model}'s shape, random weights"
    report["command"] = "python -m bench.interference"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
