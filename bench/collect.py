"""Record timings of many kinds of load for the learner (``python -m bench.collect --output FILE.jsonl.gz``).

One conflux server is sent random requests: for a few seconds each, every combination of a mode, a target and a kind of
load (few or many decodes, short or long contexts, short or long prompts), in random order. What is written is the
record (``--conflux-record``); its data card is ``bench/results/README.md``. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.client import replay
from bench.plan import PlannedRequest
from bench.shapes import SHAPES
from bench.switched import conflux_state, set_mode, settle
from bench.systems import ROOT, add_arguments, server

MODES = ("temporal", "chunked", "spatial", "reserved", "auto")
TARGETS_MS = (15.0, 25.0, 50.0, 100.0)
_IDS_FROM = 256


class Kind(NamedTuple):
    """A kind of load: requests per second, and the ranges that prompts and answers are drawn from, log-uniformly."""

    name: str
    rate: float
    prompt: tuple[int, int]
    answer: tuple[int, int]


KINDS = (
    Kind("short questions", 30.0, (16, 400), (16, 200)),
    Kind("many decodes", 40.0, (64, 1000), (200, 600)),
    Kind("code", 6.0, (1000, 8000), (8, 60)),
    Kind("conversation", 10.0, (200, 4000), (100, 400)),
    Kind("long prompts", 1.5, (8000, 30000), (16, 200)),
    Kind("mixed", 8.0, (32, 16000), (8, 400)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the record, .jsonl.gz")
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--seconds", type=float, default=240.0, help="of load in all (default: 240)")
    parser.add_argument("--slice", type=float, default=4.0, help="seconds of each combination (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "collect", help="the server's log")
    add_arguments(parser, several=False)
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(given.seed)
    combinations = list(itertools.product(MODES, TARGETS_MS, KINDS))
    rng.shuffle(combinations)
    with server("conflux-auto", given, decode_graph_batch=256) as running:
        until_s = time.monotonic() + given.seconds
        for mode, target, kind in itertools.cycle(combinations):
            if time.monotonic() > until_s:
                break
            set_mode(running.url, mode, target)
            plan = requests(kind, target, given.slice, SHAPES[given.model]["vocab_size"], rng)
            uvloop.run(replay(running.url, plan, deadline_s=given.slice))
            settle(running.url, within_s=5.0)
        state = conflux_state(running.url)
        print(json.dumps({key: state[key] for key in ("iterations", "decisions", "fallbacks", "learner")}))
    shutil.copyfile(given.logs / "conflux.jsonl.gz", given.output)
    return 0


def requests(
    kind: Kind, tbt_slo_ms: float, seconds: float, vocabulary: int, rng: random.Random
) -> list[PlannedRequest]:
    """Poisson arrivals for so long; a fifth of them at once, so that there is something to decode soon."""
    plan, at_s = [], 0.0
    first = max(1, round(0.2 * kind.rate * seconds))
    while at_s < seconds:
        prompt, answer = (_between(*of, rng) for of in (kind.prompt, kind.answer))
        ids = rng.choices(range(_IDS_FROM, vocabulary), k=prompt)
        plan.append(PlannedRequest(at_s, ids, answer, {"tbt_slo_ms": tbt_slo_ms}))
        if len(plan) >= first:
            at_s += rng.expovariate(kind.rate)
    return plan


def _between(low: int, high: int, rng: random.Random) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


if __name__ == "__main__":
    sys.exit(main())
