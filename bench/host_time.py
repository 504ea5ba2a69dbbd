"""What an iteration costs the host, stock and conflux (``python -m bench.host_time``).

So many requests decode while short prompts keep arriving, so that most batches are mixed. Reported is the scheduler's
main thread per forward, in milliseconds of CPU time and of wall time, by the parts in ``bench/host_parts``; launching
the forward and waiting for the device are parts, so what is left is what a device that is quick enough waits for.
Without a GPU ``--model tiny`` goes the same way (on a CPU launching a forward is running it).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import uvloop

from bench.client import replay
from bench.machine_facts import machine_facts
from bench.plan import PlannedRequest
from bench.shapes import SHAPES
from bench.switched import set_mode
from bench.systems import CONFLUX, ROOT, add_arguments, server

OUTSIDE = ("forward", "waiting for the device")
PROMPT_TOKENS, CONTEXT = (100, 900), 64
Parts = dict[str, list[float]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--systems", nargs="+", default=["stock-mixed-512", "conflux-auto"])
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--decodes", type=int, default=90)
    parser.add_argument("--prompts-per-s", type=float, default=20.0)
    parser.add_argument("--tbt-slo-ms", type=float, default=25.0, help="conflux's target (default: 25)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the load (default: 20)")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "host_time")
    add_arguments(parser, several=False)
    given = parser.parse_args(argv)
    given.record = False
    given.output.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"command": "python -m bench.host_time", "machine": machine_facts(), "systems": {}}
    for system in given.systems:
        report["systems"][system] = found = measure(system, given)
        given.output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{system}: {found['forwards']} forwards, ms each: CPU, wall")
        for part, of in found["parts"].items():
            print(f"  {part:32}{of['cpu_ms']:9.3f}{of['wall_ms']:9.3f}")
    return 0


def measure(system: str, given: argparse.Namespace) -> dict[str, Any]:
    """One system under the load."""
    parts = given.logs / f"{system}.parts.jsonl"
    parts.unlink(missing_ok=True)
    variables = {"CONFLUX_HOST_PARTS": str(parts)}
    with server(
        system, given, path=ROOT / "bench" / "host_parts", variables=variables, decode_graph_batch=256
    ) as running:
        if system in CONFLUX:
            set_mode(running.url, CONFLUX[system], given.tbt_slo_ms)
        uvloop.run(replay(running.url, plan(given), deadline_s=given.seconds))
    return per_forward([json.loads(line) for line in parts.read_text().splitlines()])


def plan(given: argparse.Namespace) -> list[PlannedRequest]:
    """Decodes that outlast the load, and prompts that bring two tokens each."""
    rng, vocabulary = random.Random(0), SHAPES[given.model]["vocab_size"]
    decodes = [
        PlannedRequest(0.0, rng.choices(range(256, vocabulary), k=CONTEXT), 3000, {}) for _ in range(given.decodes)
    ]
    prompts = [
        PlannedRequest(
            2.0 + at / given.prompts_per_s, rng.choices(range(256, vocabulary), k=rng.randint(*PROMPT_TOKENS)), 2, {}
        )
        for at in range(int((given.seconds - 2.0) * given.prompts_per_s))
    ]
    return decodes + prompts


def per_forward(sums: list[Parts]) -> dict[str, Any]:
    """Times of each part per forward, over the second half of the load; raises ValueError if there is too little."""
    if len(sums) < 4:
        raise ValueError("too few forwards to tell: let the load last longer")
    first, last = sums[len(sums) // 2], sums[-2]
    forwards = int(last["total"][0] - first["total"][0])

    def ms(part: str, at: int) -> float:
        return 1e3 * (last[part][at] - first.get(part, [0, 0.0, 0.0])[at]) / forwards

    found = {part: {"cpu_ms": ms(part, 1), "wall_ms": ms(part, 2)} for part in sorted(last)}
    rest = {of: ms("total", at) - sum(ms(part, at) for part in OUTSIDE if part in last) for of, at in _COLUMNS.items()}
    return {"forwards": forwards, "parts": {"all but forward and waiting": rest} | found}


_COLUMNS = {"cpu_ms": 1, "wall_ms": 2}


if __name__ == "__main__":
    sys.exit(main())
