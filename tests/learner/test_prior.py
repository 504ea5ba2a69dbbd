from __future__ import annotations

import msgspec
import numpy as np
import pytest

from learner import DeviceProfile, LatencyModel, Snapshot
from learner.columns import TERM_COLUMNS
from learner.estimator import OnlineEstimator
from learner.prior import Prior, cold_snapshot, shipped_prior
from tests.learner.estimating import draw, run
from tests.learner.worlds import CPU, H200, LARGE, GpuWorld


def test_a_gpu_starts_from_the_shipped_prior_and_a_cpu_from_the_roofline() -> None:
    prior = shipped_prior(DeviceProfile.shipped("h200"))
    assert prior is not None
    assert "bench.prior" in prior.source["command"]
    snapshot = cold_snapshot(H200)
    snapshot.validate()
    assert snapshot.version == 0
    assert dict(zip(TERM_COLUMNS, snapshot.coefficients, strict=True))["forward"] > 0.0
    assert cold_snapshot(CPU) == Snapshot.roofline()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coefficients": {"magic_s": 1.0}}, "unknown terms: magic_s"),
        ({"contention": {"forward": 1.0}}, "unknown terms: forward"),
        ({"coefficients": {"forward": -1.0}}, "coefficients has a number"),
        ({"contention": {"decode_shared_memory_s": float("nan")}}, "contention has a number"),
    ],
)
def test_a_prior_that_cannot_be_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        Prior(**({"coefficients": {}, "contention": {}} | change))


def test_arrays_survive_the_names() -> None:
    prior = shipped_prior(H200)
    snapshot = prior.snapshot()
    again = Prior.of(np.array(snapshot.coefficients), np.array(snapshot.contention), prior.source)
    assert again == prior
    assert msgspec.json.decode(msgspec.json.encode(prior), type=Prior) == prior


def world_prior() -> Prior:
    """What was learnt of another run."""
    estimator = OnlineEstimator(GpuWorld.shape, GpuWorld.profile)
    run(estimator, draw(GpuWorld(3), 400))
    snapshot = estimator.model.snapshot
    return Prior.of(np.array(snapshot.coefficients), np.array(snapshot.contention), {})


def test_it_is_near_from_the_start_and_converges_as_the_roofline_does() -> None:
    prior, records = world_prior(), draw(GpuWorld(21), 400)
    shape, device = GpuWorld.shape, GpuWorld.profile
    warm = run(OnlineEstimator(shape, device, prior=prior), records)
    cold = run(OnlineEstimator(shape, device), records)
    first, last = slice(0, 30), slice(len(warm.mean_s) // 2, None)
    assert warm.take(first).error() < 0.6 * cold.take(first).error()
    assert warm.take(last).error() < 1.1 * cold.take(last).error() + 0.005


def test_a_wrong_prior_is_unlearnt() -> None:
    """Everything is thought to take thrice as long."""
    roofline = Snapshot.roofline()
    wrong = Prior.of(3.0 * np.array(roofline.coefficients), np.array(roofline.contention), {})
    records = draw(GpuWorld(22), 400)
    steps = run(OnlineEstimator(GpuWorld.shape, GpuWorld.profile, prior=wrong), records)
    right = run(OnlineEstimator(GpuWorld.shape, GpuWorld.profile), records)
    last = slice(len(steps.mean_s) // 2, None)
    assert steps.take(slice(0, 10)).error() > 0.5
    assert steps.take(last).error() < 1.2 * right.take(last).error() + 0.005


def test_it_is_kept_over_a_restart_that_has_learnt_nothing() -> None:
    prior = shipped_prior(H200)
    estimator = OnlineEstimator(LARGE, H200, prior=prior)
    successor = OnlineEstimator(LARGE, H200, prior=prior)
    successor.restore(estimator.state())
    assert successor.model.snapshot == prior.snapshot()
    expected = LatencyModel(LARGE, H200, prior.snapshot())
    asked = ([4096], [0], 1, 66)
    got_s, expected_s = (model.predict(model.terms(*asked)).mean_s for model in (successor.model, expected))
    assert got_s == pytest.approx(expected_s)
