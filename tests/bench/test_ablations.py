from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import ablations
from learner import contention, estimator, fitting
from learner.records import Header
from tests.learner.worlds import GpuWorld

RECORD = Path(__file__).parents[2] / "bench" / "results" / "h200-qwen3-8b-spatial.jsonl.gz"
HEADER = Header(created_unix_s=0.0, model=GpuWorld.shape, device=GpuWorld.profile)


def world() -> list:
    draws = GpuWorld(5)
    return [draws.draw() for _ in range(60)]


def test_every_variant_predicts_and_leaves_the_learner_as_it_was() -> None:
    iterations = world()
    steps = ablations.Steps(HEADER, iterations)
    before = ablations.online(HEADER, iterations, steps)
    kept = (contention.Contention.columns, estimator.LatencyModel.__init__, estimator.Window, fitting._FITTED)
    half = len(steps) // 2
    different = {}
    for name, (predict, around) in ablations.variants().items():
        if name == "offline forest":
            continue
        with around():
            found = predict(HEADER, iterations, steps)
        assert found.shape == steps.measured_s.shape
        assert (found[half:] > 0.0).all()
        different[name] = not np.allclose(found[half:], before[half:])
    assert different.pop("learner") is False
    # So short a record is one stratum, and has no correction yet.
    same = {name for name, differs in different.items() if not differs}
    assert same <= {"without strata", "without correction"}
    assert (contention.Contention.columns, estimator.LatencyModel.__init__, estimator.Window, fitting._FITTED) == kept
    np.testing.assert_allclose(ablations.online(HEADER, iterations, steps), before)


def test_figures_are_by_their_definition() -> None:
    measured, predicted = np.array([1.0, 2.0, 4.0]), np.array([1.1, 2.0, 2.0])
    found = ablations.figures(measured, predicted, np.array([1, 1, 4]))
    assert found["mape"] == pytest.approx(20.0)
    assert found["max_ape"] == pytest.approx(50.0)
    assert found["mape_by_group"] == {"decode": 5.0, "decode_beside": 50.0}


def test_it_writes_what_it_found(tmp_path, monkeypatch) -> None:
    path = tmp_path / "found.json"
    names = ["roofline", "calibrated roofline"]
    monkeypatch.setattr(sys, "argv", ["ablations", str(RECORD), "--output", str(path), "--variants", *names])
    assert ablations.main() == 0
    found = json.loads(path.read_text())["records"][RECORD.name]
    assert list(found["variants"]) == names
    # The device is not its roofline; a factor for each kind of forward makes up for much of that.
    mape = {name: found["variants"][name]["all"]["mape"] for name in names}
    assert mape["calibrated roofline"] < mape["roofline"]
