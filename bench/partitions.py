"""Draw what windows' halves took on so many TPCs, and what was predicted (``python -m bench.partitions RECORD …``).

The record is replayed through a fresh learner. Left decode steps of ``--decodes`` requests while a prefill ran beside
them all the time, right prefills of ``--prefill`` tokens; in both measured times, what the learner expected before it
saw them, and the roofline.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from learner.estimator import OnlineEstimator, StepPrediction
from learner.record_file import RecordReader
from learner.samples import Sample, samples_of

Times = dict[int, list[tuple[float, StepPrediction]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--decodes", type=int, default=32, help="requests in the decode batch (default: 32)")
    parser.add_argument("--prefill", type=int, default=8192, help="new tokens of the prefills (default: 8192)")
    parser.add_argument("--output", type=Path, required=True, help=".svg, .png or .pdf")
    given = parser.parse_args()
    with RecordReader(given.record) as reader:
        title = f"{reader.header.model.name}'s shape on {reader.header.device.name}"
        estimator = OnlineEstimator(reader.header.model, reader.header.device)
        decode: Times = defaultdict(list)
        prefill: Times = defaultdict(list)
        for iteration in reader:
            if iteration.mode == "spatial" and estimator.model.version:
                pairs = zip(samples_of(iteration), estimator.predict_iteration(iteration), strict=True)
                for sample, predicted in pairs:
                    _sort(sample, predicted, given, decode, prefill)
            estimator.observe(iteration)
            if estimator.ready():
                estimator.fit()
    if not decode or not prefill:
        print(f"error: {given.record} has no such halves of spatial windows", file=sys.stderr)
        return 1
    names = (f"one decode step of {given.decodes} requests", f"a prefill of {given.prefill:,} tokens")
    draw(dict(zip(names, (decode, prefill), strict=True)), title, given.output)
    return 0


def _sort(sample: Sample, predicted: StepPrediction, given: argparse.Namespace, decode: Times, prefill: Times) -> None:
    if sample.beside is None or not sample.measured_s > 0.0:
        return
    tokens = int(sample.q.sum())
    if tokens == len(sample.q) == given.decodes and sample.share > 0.99:
        decode[sample.tpcs].append((sample.measured_s, predicted))
    elif tokens == given.prefill and len(sample.q) == 1:
        prefill[sample.tpcs].append((sample.measured_s, predicted))


def draw(panels: dict[str, Times], title: str, output: Path) -> None:
    """One panel for each kind of half, times over TPCs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (name, times) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        tpcs = sorted(times)
        points = [(at, 1e3 * measured_s) for at in tpcs for measured_s, _ in times[at]]
        axes.scatter(*zip(*points, strict=True), s=9, alpha=0.35, color="#4878a8", label="measured", rasterized=True)
        for label, field, colour in (("learner", "mean_s", "#c9782f"), ("roofline", "roofline_s", "#888888")):
            middle = [1e3 * statistics.median(getattr(predicted, field) for _, predicted in times[at]) for at in tpcs]
            axes.plot(tpcs, middle, marker="o", markersize=4, color=colour, label=label)
        axes.set(title=name, xlabel="TPCs of its own", ylabel="ms", ylim=(0, None))
        axes.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(output)


if __name__ == "__main__":
    sys.exit(main())
