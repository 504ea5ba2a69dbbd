"""What a new model or GPU starts from (``python -m bench.prior``).

Fits ``learner/priors/gpu.json`` and says how it does. The prior is one fit of the latency model's terms to the newest
samples of every stratum of some records. For each of them the errors of a fresh learner over its first samples are
reported, from the bare roofline and from a prior that was fitted to the *other* records; and again on a device with
other curves, for which the record's times are rescaled by the ratio of the rooflines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from learner.columns import COLUMN
from learner.device import DeviceProfile
from learner.estimator import OnlineEstimator
from learner.fitting import fit_terms
from learner.latency import LatencyModel
from learner.prior import Prior
from learner.record_file import RecordReader
from learner.records import Iteration, StreamRecord
from learner.samples import samples_of
from learner.shape import ModelShape
from learner.window import Batch, Window

ROOT = Path(__file__).resolve().parent.parent
# Whole runs that were recorded after the learner was last tuned; see bench.accuracy.
HELD_BACK = ("h200-qwen3-8b-modes-8k.jsonl.gz",)
RECORDS = [path for path in sorted((ROOT / "bench" / "results").glob("h200-*.jsonl.gz")) if path.name not in HELD_BACK]
OUTPUT = ROOT / "learner" / "priors" / "gpu.json"
CAPACITY, STRATUM = 8192, 256
UP_TO = (10, 30, 100, 300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "records",
        type=Path,
        nargs="*",
        default=RECORDS,
        help="default: those in bench/results not held back",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the prior goes")
    parser.add_argument("--json", type=Path, help="where the figures go as well")
    given = parser.parse_args()
    batches = {path.name: batch_of(path) for path in given.records}
    prior = fitted(list(batches.values()), ", ".join(batches))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_bytes(msgspec.json.format(msgspec.json.encode(prior), indent=1) + b"\n")
    figures = {path.name: transfer(path, batches) for path in given.records if len(given.records) > 1}
    report = {"command": "python -m bench.prior", "mape_pct_of_samples_up_to": list(UP_TO), "records": figures}
    print(json.dumps(report, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def batch_of(path: Path) -> Batch:
    """What is left of a record in a window that keeps some of every kind."""
    with RecordReader(path) as reader:
        estimator = OnlineEstimator(reader.header.model, reader.header.device)
        estimator._window = Window(CAPACITY, STRATUM, reader.header.device.tpcs)
        for iteration in reader:
            estimator.observe(iteration)
    return estimator._window.batch()


def fitted(batches: Sequence[Batch], source: str) -> Prior:
    """The prior that fits all of them."""
    fields = (field for field in Batch.__slots__)
    batch = Batch(*(np.concatenate([getattr(one, field) for one in batches]) for field in fields))
    # Most forwards of these records have one prompt, which does not tell a prompt's cost from a prefill's.
    batch.columns[:, COLUMN["prefill_rows"]] = 0.0
    return Prior.of(*fit_terms(batch, np.ones(len(batch))), {"records": source, "command": "python -m bench.prior"})


def transfer(path: Path, batches: dict[str, Batch]) -> dict[str, Any]:
    """Errors over a record's first samples from the roofline, and from a prior that never saw it."""
    prior = fitted([batch for name, batch in batches.items() if name != path.name], "the others")
    found: dict[str, Any] = {}
    with RecordReader(path) as reader:
        shape, device = reader.header.model, reader.header.device
        records = list(itertools.islice(reader, 3 * UP_TO[-1]))
    other = other_curves(device)
    rescaled = list(on_other_curves(records, shape, device, other))
    for name, profile, those in (("as recorded", device, records), ("on other curves", other, rescaled)):
        for kind, start in (("roofline", None), ("prior", prior)):
            found[f"{name}, from the {kind}"] = errors(those, OnlineEstimator(shape, profile, prior=start))
    return found


def errors(records: Iterable[Iteration], estimator: OnlineEstimator) -> list[float]:
    """MAPE, %, of samples up to each of UP_TO, every one predicted before it was learnt."""
    off: list[float] = []
    for record in records:
        if len(off) >= UP_TO[-1]:
            break
        steps = zip(samples_of(record), estimator.predict_iteration(record), strict=True)
        off += [abs(step.mean_s / sample.measured_s - 1.0) for sample, step in steps if not sample.host_bound]
        estimator.observe(record)
        if estimator.ready():
            estimator.fit()
    parts = itertools.pairwise((0, *UP_TO))
    return [round(100.0 * float(np.mean(off[early:late])), 2) for early, late in parts if off[early:late]]


def other_curves(device: DeviceProfile) -> DeviceProfile:
    """A device of half the FLOP/s and 0.8 of the bandwidth, which saturates later."""
    flops = tuple((s, 0.5 * rate) for s, rate in device.flops)
    whole = device.bandwidth[-1][1]
    bandwidth = tuple((s, 0.8 * min(rate, whole * s / device.tpcs * 2.0)) for s, rate in device.bandwidth)
    return msgspec.structs.replace(device, name=f"half of {device.name}", flops=flops, bandwidth=bandwidth)


def on_other_curves(
    records: Iterable[Iteration], shape: ModelShape, device: DeviceProfile, other: DeviceProfile
) -> Iterator[Iteration]:
    """Records as the ``other`` device might have made them: every forward longer by the ratio of the rooflines."""
    models = LatencyModel(shape, device), LatencyModel(shape, other)

    def stretched(stream: StreamRecord) -> StreamRecord:
        own_s, other_s = (
            model.terms(stream.q, stream.c, stream.logits_rows, stream.tpcs).roofline_s for model in models
        )
        ratio = float(other_s[0] / own_s[0])
        ends = [
            start + ratio * (end - start) for start, end in zip(stream.step_start_s, stream.step_end_s, strict=True)
        ]
        return msgspec.structs.replace(stream, step_end_s=ends)

    for record in records:
        yield msgspec.structs.replace(record, streams=[stretched(stream) for stream in record.streams])


if __name__ == "__main__":
    sys.exit(main())
