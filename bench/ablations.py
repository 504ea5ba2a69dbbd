"""What each part of the learner is worth (``python -m bench.ablations RECORD … --output FILE``).

Each record is replayed in order, predict then learn, through the learner and through the learner without one of its
parts; beside them stand the bare roofline, a roofline times the running median of measured / roofline of each kind of
forward, and, trained offline on the first half of a record's steps, ridge regression, a random forest and gradient
boosting on the learner's own columns. The first 200 steps of a record are not judged; offline models are judged on the
second half only, as is everything in ``second_half``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from bench.machine_facts import machine_facts
from learner import contention, estimator, fitting
from learner.columns import LINEAR_COLUMNS, PHASES
from learner.estimator import OnlineEstimator
from learner.record_file import RecordReader
from learner.records import Header, Iteration
from learner.samples import samples_of
from learner.snapshot import GROUP_NAMES
from learner.window import Window

JUDGED_FROM = 200
MEDIAN_OF = 64


class Steps:
    """Every timed step of a record: measured, roofline, features and group, and the iteration that it is of."""

    def __init__(self, header: Header, iterations: list[Iteration]) -> None:
        model = OnlineEstimator(header.model, header.device).model
        rows, measured, roofline, group, self.of = [], [], [], [], []
        for number, iteration in enumerate(iterations):
            for sample in samples_of(iteration):
                terms = model.terms(sample.q, sample.c, sample.logits_rows, sample.tpcs)
                beside = np.zeros(contention.CONTENTION_TERMS)
                if sample.beside is not None:
                    other = sample.beside
                    beside_terms = model.terms(other.q, other.c, other.logits_rows, other.tpcs)
                    beside = model.contention_columns(terms, beside_terms, [sample.share])[:, 0]
                rows.append(np.concatenate([terms.matrix[0], beside, [sample.tpcs]]))
                measured.append(sample.measured_s)
                roofline.append(terms.roofline_s[0])
                group.append(int(terms.column("phase")[0]) + len(PHASES) * sample.mostly_beside)
                self.of.append(number)
        self.columns, self.measured_s, self.roofline_s = np.array(rows), np.array(measured), np.array(roofline)
        self.group = np.array(group)

    def __len__(self) -> int:
        return len(self.measured_s)


def online(header: Header, iterations: list[Iteration], steps: Steps) -> np.ndarray:
    """Means [n] that a fresh learner predicts before it sees each step."""
    learner = OnlineEstimator(header.model, header.device)
    found: list[float] = []
    for iteration in iterations:
        found += [step.mean_s for step in learner.predict_iteration(iteration)]
        learner.observe(iteration)
        if learner.ready():
            learner.fit()
    return np.array(found)


def calibrated(header: Header, iterations: list[Iteration], steps: Steps) -> np.ndarray:
    """Roofline times the median of the last measured / roofline of its group."""
    ratios: dict[int, deque[float]] = defaultdict(lambda: deque([1.0], maxlen=MEDIAN_OF))
    found = np.empty(len(steps))
    for at, group in enumerate(steps.group):
        found[at] = steps.roofline_s[at] * np.median(ratios[group])
        ratios[group].append(steps.measured_s[at] / steps.roofline_s[at])
    return found


def offline(make: Callable[[], Any]) -> Callable[[Header, list[Iteration], Steps], np.ndarray]:
    """A regression of log(measured / roofline) on all columns, trained on the first half; NaN there."""

    def predict(header: Header, iterations: list[Iteration], steps: Steps) -> np.ndarray:
        half = len(steps) // 2
        features = np.concatenate([steps.columns, np.log(steps.roofline_s)[:, None], np.eye(6)[steps.group]], axis=1)
        target = np.log(steps.measured_s / steps.roofline_s)
        model = make().fit(features[:half], target[:half])
        found = np.full(len(steps), np.nan)
        found[half:] = steps.roofline_s[half:] * np.exp(model.predict(features[half:]))
        return found

    return predict


@contextmanager
def without_contention() -> Iterator[None]:
    """Nothing but whether another stream runs beside."""
    columns = contention.Contention.columns

    def none(self: Any, *args: Any) -> np.ndarray:
        found = columns(self, *args)
        found[1:] = 0.0
        return found

    with mock.patch.object(contention.Contention, "columns", none):
        yield


@contextmanager
def without_partitions() -> Iterator[None]:
    """No work that scales worse than the device's curves."""
    made = estimator.LatencyModel.__init__

    def init(self: Any, *args: Any) -> None:
        made(self, *args)
        self._roofline.by_tpcs[2] = 0.0

    with mock.patch.object(estimator.LatencyModel, "__init__", init):
        yield


def without_nearby() -> AbstractContextManager[Any]:
    """No shift by the newest like forwards."""
    look = OnlineEstimator._look_nearby

    def none(self: OnlineEstimator, *args: Any) -> Any:
        return msgspec.structs.replace(look(self, *args), nearby=[], nearby_weight=[0.0] * len(GROUP_NAMES))

    return mock.patch.object(OnlineEstimator, "_look_nearby", none)


@contextmanager
def fewer_terms() -> Iterator[None]:
    """The roofline's own terms, and what a forward costs whatever is in it."""
    few = tuple(term for term in fitting._FITTED if term[0][0] in _FEW)
    fitting._groupings.cache_clear()
    try:
        with mock.patch.object(fitting, "_FITTED", few):
            yield
    finally:
        fitting._groupings.cache_clear()


def one_stratum() -> AbstractContextManager[Any]:
    """A window of the newest samples, whatever they are."""
    return mock.patch.object(estimator, "Window", lambda capacity, _, tpcs: Window(capacity, capacity, tpcs))


def variants() -> dict[str, tuple[Callable[..., np.ndarray], Callable[[], AbstractContextManager[Any]]]]:
    """How to predict, and in what surroundings."""
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def forest() -> Any:
        return RandomForestRegressor(200, min_samples_leaf=2, random_state=0)

    return {
        "learner": (online, nullcontext),
        "without correction": (online, lambda: mock.patch.object(estimator, "CORRECTION_SAMPLES", 1 << 30)),
        "without what is nearby": (online, without_nearby),
        "without contention": (online, without_contention),
        "without partition terms": (online, without_partitions),
        "without strata": (online, one_stratum),
        "with the roofline's terms only": (online, fewer_terms),
        "calibrated roofline": (calibrated, nullcontext),
        "roofline": (lambda header, iterations, steps: steps.roofline_s, nullcontext),
        "offline ridge": (offline(lambda: make_pipeline(StandardScaler(), Ridge(1.0))), nullcontext),
        "offline forest": (offline(forest), nullcontext),
        "offline boosting": (offline(lambda: HistGradientBoostingRegressor(random_state=0)), nullcontext),
    }


_FEW = (
    *("elementwise_s", "attention_prefill_s", "attention_decode_s", "classifier_s", "all_reduce_s"),
    *(LINEAR_COLUMNS[0], "forward", "prefill_forward"),
)


def figures(measured_s: np.ndarray, predicted_s: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    """Absolute errors in per cent: mean, 99th percentile, largest; and the mean by group."""
    error = 100.0 * np.abs(predicted_s / measured_s - 1.0)
    by_group = {
        name: round(float(error[group == at].mean()), 2) for at, name in enumerate(GROUP_NAMES) if (group == at).any()
    }
    names = {"mape": error.mean(), "p99_ape": np.quantile(error, 0.99), "max_ape": error.max()}
    return {name: round(float(value), 2) for name, value in names.items()} | {"mape_by_group": by_group}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--variants", nargs="*", default=list(variants()), metavar="NAME", help="default: all")
    given = parser.parse_args()
    report: dict[str, Any] = {"command": "python -m bench.ablations", "machine": machine_facts(), "records": {}}
    for path in given.records:
        with RecordReader(path) as reader:
            header, iterations = reader.header, list(reader)
        steps = Steps(header, iterations)
        half = len(steps) // 2
        found: dict[str, Any] = {}
        for name in given.variants:
            predict, around = variants()[name]
            with around():
                predicted_s = predict(header, iterations, steps)
            late = slice(half, None)
            found[name] = {"second_half": figures(steps.measured_s[late], predicted_s[late], steps.group[late])}
            if np.isfinite(predicted_s).all():
                judged = slice(JUDGED_FROM, None)
                found[name]["all"] = figures(steps.measured_s[judged], predicted_s[judged], steps.group[judged])
            print(path.name, name, json.dumps(found[name]), flush=True)
        report["records"][path.name] = {"steps": len(steps), "variants": found}
        given.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
