"""How well forwards are predicted before they run (``python -m bench.accuracy --output FILE``).

Replays records in order, predict then learn, and reports three things. ``records``: errors from the 201st sample of
each record on, of the learner, of a roofline times the running median of its group, of the bare roofline and of
persistence (what the most similar batch took last); by phase and by mode; how often the upper bound held, in total and
in the worst and best thousand, and how far above the mean it lies. ``held_back``: the same for whole records that
nothing was tuned on. ``step_change``: from the middle of a record on, times of a device with other curves
(:func:`bench.prior.other_curves`); the learner is not told.

Forwards that waited for the host nearly all along (``launch_s``) say nothing of the device: they are counted, and left
out of the errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.ablations import JUDGED_FROM, MEDIAN_OF
from bench.machine_facts import machine_facts
from bench.prior import HELD_BACK, on_other_curves, other_curves
from learner.columns import PHASES
from learner.estimator import OnlineEstimator
from learner.persistence import Persistence
from learner.prior import shipped_prior
from learner.record_file import RecordReader
from learner.records import Header, Iteration
from learner.samples import Sample, samples_of
from learner.snapshot import GROUP_NAMES

RESULTS = Path(__file__).resolve().parent / "results"
# First runs on a GPU, of a state of the code that timed forwards otherwise.
LEFT_OUT = ("h200-qwen3-8b-auto.jsonl.gz", "h200-qwen3-8b-spatial.jsonl.gz")
STEP_CHANGE = "h200-qwen3-8b-interference.jsonl.gz"
COVERED_IN, AFTER_CHANGE = 1000, (100, 200, 300, 500, 1000, 2000)
_COLUMNS = ("measured", "learner", "upper", "roofline", "calibrated", "persistence", "group")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="*", help="default: those in bench/results")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    given = parser.parse_args()
    paths = given.records or [p for p in sorted(RESULTS.glob("h200-*.jsonl.gz")) if p.name not in LEFT_OUT]
    report: dict[str, Any] = {"command": "python -m bench.accuracy", "machine": machine_facts()}
    for path in paths:
        with RecordReader(path) as reader:
            found = figures(reader.header, reader)
        part = "held_back" if path.name in HELD_BACK else "records"
        report.setdefault(part, {})[path.name] = found
        print(path.name, json.dumps(found), flush=True)
        if path.name == STEP_CHANGE:
            with RecordReader(path) as reader:
                report["step_change"] = {path.name: step_change(reader.header, list(reader))}
            print("step change", json.dumps(report["step_change"]), flush=True)
        given.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


class Judged:
    """Every sample of some iterations with what was said of it before it was learnt."""

    def __init__(self, header: Header, iterations: Iterable[Iteration]) -> None:
        self._learner = OnlineEstimator(header.model, header.device, prior=shipped_prior(header.device))
        self._persistence = Persistence()
        self._ratios: dict[int, deque[float]] = defaultdict(lambda: deque([1.0], maxlen=MEDIAN_OF))
        self.host_bound, self.modes, self.regimes = 0, [], set[tuple[Any, ...]]()
        rows = []
        for iteration in iterations:
            rows += list(self._judge(iteration))
        self.columns = dict(zip(_COLUMNS, np.array(rows).T, strict=True))

    def _judge(self, iteration: Iteration) -> Iterator[tuple[float, ...]]:
        try:
            samples, predictions = samples_of(iteration), self._learner.predict_iteration(iteration)
        except ValueError:
            return
        for sample, predicted in zip(samples, predictions, strict=True):
            if sample.host_bound:
                self.host_bound += 1
                continue
            phase = iteration.streams[sample.stream].phase
            group = PHASES.index(phase) + len(PHASES) * sample.mostly_beside
            ratios, measured_s, roofline_s = self._ratios[group], sample.measured_s, predicted.roofline_s
            persisted_s = self._persistence.predict(phase, sample) or roofline_s
            yield (
                measured_s,
                predicted.mean_s,
                predicted.upper_s,
                roofline_s,
                roofline_s * float(np.median(ratios)),
                persisted_s,
                group,
            )
            ratios.append(measured_s / roofline_s)
            self.modes.append(iteration.mode)
            self.regimes.add((group, iteration.mode, *regime(sample)))
            self._persistence.observe(phase, sample)
        self._learner.observe(iteration)
        if self._learner.ready():
            self._learner.fit()

    def error_pct(self, predictor: str, at: Any) -> np.ndarray:
        """Absolute errors of some samples, in per cent."""
        return 100.0 * np.abs(self.columns[predictor][at] / self.columns["measured"][at] - 1.0)


def regime(sample: Sample) -> tuple[int, ...]:
    """What a batch is like: to the next power of two, new tokens, requests and context; and TPCs."""
    return (*(int(x).bit_length() for x in (sample.q.sum(), len(sample.q), sample.c.sum())), sample.tpcs)


def figures(header: Header, iterations: Iterable[Iteration]) -> dict[str, Any]:
    """What ``records`` says of one."""
    judged = Judged(header, iterations)
    group = judged.columns["group"].astype(int)
    late = np.arange(len(group)) >= JUDGED_FROM
    mode = np.array(judged.modes)
    shared = (group >= len(PHASES)) | (group == PHASES.index("mixed"))
    return {
        "samples": len(group),
        "regimes": len(judged.regimes),
        "share_mixed_or_beside": round(float(shared.mean()), 3),
        "waited_for_the_host": judged.host_bound,
        **{name: errors(judged, name, late) for name in ("learner", "calibrated", "roofline", "persistence")},
        "by_phase": {GROUP_NAMES[at]: one(judged, late & (group == at)) for at in np.unique(group[late])},
        "by_mode": {str(at): one(judged, late & (mode == at)) for at in np.unique(mode[late])},
        "upper_bound": bound(judged, late),
    }


def errors(judged: Judged, predictor: str, at: np.ndarray) -> dict[str, float]:
    """Mean, 99th percentile and largest."""
    error = judged.error_pct(predictor, at)
    return {
        "mape": round(float(error.mean()), 2),
        "p99_ape": round(float(np.quantile(error, 0.99)), 2),
        "max_ape": round(float(error.max()), 1),
    }


def one(judged: Judged, at: np.ndarray) -> dict[str, float]:
    """The learner's errors over some samples, and its bound's."""
    upper, measured = judged.columns["upper"][at], judged.columns["measured"][at]
    return {
        "samples": len(measured),
        **errors(judged, "learner", at),
        "coverage": round(float((measured <= upper).mean()), 4),
        "width_pct": round(100.0 * float((upper / judged.columns["learner"][at] - 1.0).mean()), 1),
    }


def bound(judged: Judged, at: np.ndarray) -> dict[str, float]:
    """Coverage over all, and over the worst and best of every COVERED_IN samples."""
    upper, measured = judged.columns["upper"][at], judged.columns["measured"][at]
    held = measured <= upper
    runs = np.convolve(held, np.ones(COVERED_IN), "valid") / COVERED_IN if held.size >= COVERED_IN else held
    return {
        "coverage": round(float(held.mean()), 4),
        "least_in_1000": round(float(runs.min()), 4),
        "most_in_1000": round(float(runs.max()), 4),
        "width_pct": round(100.0 * float((upper / judged.columns["learner"][at] - 1.0).mean()), 2),
    }


def step_change(header: Header, iterations: list[Iteration]) -> dict[str, Any]:
    """Errors and coverage before the change and in the samples after it, up to each of AFTER_CHANGE."""
    half = len(iterations) // 2
    changed = on_other_curves(iterations[half:], header.model, header.device, other_curves(header.device))
    before = sum(not s.host_bound for iteration in iterations[:half] for s in samples_of(iteration))
    judged = Judged(header, [*iterations[:half], *changed])
    found: dict[str, Any] = {"before": one(judged, np.arange(before - 1000, before))}
    first = 0
    for last in AFTER_CHANGE:
        found[f"samples {first + 1} to {last} after"] = one(judged, np.arange(before + first, before + last))
        first = last
    return found


if __name__ == "__main__":
    sys.exit(main())
