"""A year of records through one learner (``python -m bench.year --output FILE``).

Ten million iterations, generated: decode steps, mixed batches and windows of an H200 that drifts and is noisy, each
encoded and decoded as on its way to a learner process, then learnt. Fits come every FIT_EVERY iterations, as in a
process that may not use a whole core. Reported at every million: resident memory, size of the state file, error of
what was predicted before it was learnt, microseconds per iteration.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.machine_facts import machine_facts
from bench.shapes import SHAPES
from learner.device import DeviceProfile
from learner.estimator import OnlineEstimator
from learner.latency import LatencyModel
from learner.records import Iteration, StreamRecord
from learner.shape import ModelShape

FIT_EVERY, REPORTS = 2000, 10
PATTERNS = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000_000)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    given = parser.parse_args()
    shape = ModelShape.from_hf_config(SHAPES["Qwen3-8B"], name="Qwen3-8B", dtype="bfloat16")
    device = DeviceProfile.shipped("h200")
    learner = OnlineEstimator(shape, device)
    every = max(given.iterations // REPORTS, 1)
    report: dict[str, Any] = {"command": "python -m bench.year", "machine": machine_facts(), "at": []}
    begin_s, off = time.perf_counter(), []
    for number, sent in enumerate(messages(shape, device, given.iterations), start=1):
        iteration = msgspec.msgpack.decode(sent, type=Iteration)
        if number % FIT_EVERY == 0:
            steps = learner.predict_iteration(iteration)
            stream = iteration.streams[0]
            off.append(abs(steps[0].mean_s / (stream.step_end_s[0] - stream.step_start_s[0]) - 1.0))
        learner.observe(iteration)
        if number % FIT_EVERY == 0 and learner.ready():
            learner.fit()
        if number % every == 0:
            taken_s = time.perf_counter() - begin_s
            row = {
                "iterations": number,
                "resident_mib": round(resident_bytes() / 2**20, 1),
                "state_bytes": len(learner.state()),
                "mape_pct": round(100.0 * float(np.mean(off)), 2) if off else None,
                "us_per_iteration": round(1e6 * taken_s / number, 1),
            }
            off.clear()
            report["at"].append(row)
            print(json.dumps(row), flush=True)
            given.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def messages(shape: ModelShape, device: DeviceProfile, count: int) -> Iterator[bytes]:
    """Encoded iterations whose times are the roofline's times a factor by phase, slow drift and 2 % of noise."""
    random = np.random.default_rng(0)
    model = LatencyModel(shape, device)
    patterns = [_pattern(random, model) for _ in range(PATTERNS)]
    encoder = msgspec.msgpack.Encoder()
    for number in range(count):
        iteration, roofline_s = patterns[int(random.integers(PATTERNS))]
        drift = 1.2 + 0.1 * math.sin(2.0 * math.pi * number / 1e6)
        taken_s = roofline_s * drift * math.exp(0.02 * random.standard_normal())
        stream = msgspec.structs.replace(iteration.streams[0], step_start_s=[0.0], step_end_s=[taken_s])
        yield encoder.encode(msgspec.structs.replace(iteration, iteration=number, streams=[stream]))


def _pattern(random: np.random.Generator, model: LatencyModel) -> tuple[Iteration, float]:
    """One batch without its times, and its roofline in seconds."""
    decodes = int(random.integers(1, 65))
    q, c = [1] * decodes, random.integers(128, 8192, decodes).tolist()
    phase = "decode"
    if random.random() < 0.4:
        phase, q, c = "mixed", [*q, int(random.integers(32, 2049))], [*c, int(random.integers(0, 8192))]
    roofline_s = float(model.terms(q, c, len(q), model.total_tpcs).roofline_s[0])
    stream = StreamRecord(
        phase=phase, tpcs=model.total_tpcs, q=q, c=c, logits_rows=len(q), step_start_s=[], step_end_s=[],
        predicted_s=[roofline_s], upper_s=[roofline_s], roofline_s=[roofline_s],
    )  # fmt: skip
    iteration = Iteration(
        iteration=0, time_s=0.0, mode="temporal", reason="fits", tbt_slo_s=0.1, model_version=0, running=decodes,
        waiting=0, concurrent=False, host_overhead_s=0.0, candidates=None, decision=-1, streams=[stream],
    )  # fmt: skip
    return iteration, roofline_s


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    sys.exit(main())
