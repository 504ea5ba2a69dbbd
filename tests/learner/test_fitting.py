from __future__ import annotations

import numpy as np
import pytest

from learner import LatencyModel
from learner.columns import LOG_FEATURES, TERM_COLUMNS, TERMS
from learner.contention import CONTENTION_TERMS
from learner.fitting import fit_correction, fit_terms, logs_of, weighted_quantile
from learner.snapshot import COLD_CONTENTION, KNOTS, MAX_CORRECTION
from learner.window import Batch
from tests.learner.worlds import CPU, SMALL

MODEL = LatencyModel(SMALL, CPU)


def batch_of(random: np.random.Generator, n: int, *, prefills: bool = True) -> Batch:
    """Random batches; measured time is 1."""
    rows = []
    for _ in range(n):
        decodes = int(random.integers(0 if prefills else 1, 17))
        q = [int(random.integers(2, 300))] * (prefills and (decodes == 0 or random.random() < 0.5)) + [1] * decodes
        rows.append(MODEL.terms(q, random.integers(1, 800, len(q)), len(q), 1))
    columns = np.concatenate([terms.matrix for terms in rows])
    roofline = np.concatenate([terms.roofline_s for terms in rows])
    group = columns[:, TERMS + 2].astype(np.intp)
    return Batch(columns, np.zeros((n, CONTENTION_TERMS)), roofline, np.ones(n), group, np.arange(float(n)))


def timed(batch: Batch, measured_s: np.ndarray) -> Batch:
    return Batch(batch.columns, batch.contention, batch.roofline_s, measured_s, batch.group, batch.serial)


def truth(batch: Batch) -> np.ndarray:
    column = {name: batch.columns[:, at] for at, name in enumerate(TERM_COLUMNS)}
    return 2.0 * batch.roofline_s + 0.5 * column["attention_padded_s"] + 0.01 + 0.002 * column["decode_rows"]


def error(batch: Batch, coefficients: np.ndarray) -> float:
    """95 % of the fitted times are within this of the true ones."""
    return float(np.quantile(np.abs(batch.columns[:, :TERMS] @ coefficients / truth(batch) - 1.0), 0.95))


def test_finds_a_sum_of_terms() -> None:
    random = np.random.default_rng(0)
    batch = batch_of(random, 1000)
    coefficients, contention = fit_terms(timed(batch, truth(batch)), np.ones(1000))
    assert (coefficients >= 0.0).all()
    assert (contention >= 0.0).all()
    assert error(batch_of(random, 200), coefficients) < 0.02


def test_outliers_do_not_move_it() -> None:
    random = np.random.default_rng(1)
    batch = batch_of(random, 1000)
    measured = truth(batch) * np.exp(0.1 * random.standard_normal(1000))
    clean, _ = fit_terms(timed(batch, measured), np.ones(1000))
    paused = np.where(random.random(1000) < 0.05, 10.0 * measured, measured)
    dirty, _ = fit_terms(timed(batch, paused), np.ones(1000))
    assert error(batch, clean) < 0.06
    assert error(batch, dirty) < 0.08


def test_what_was_not_seen_keeps_the_general_ratio() -> None:
    batch = batch_of(np.random.default_rng(2), 300, prefills=False)
    coefficients, contention = fit_terms(timed(batch, 3.0 * batch.roofline_s), np.ones(300))
    unseen = coefficients[TERM_COLUMNS.index("attention_prefill_s")]
    assert unseen == pytest.approx(3.0, rel=0.1)
    np.testing.assert_allclose(contention, unseen * np.array(COLD_CONTENTION), rtol=1e-6)


def test_weights_count() -> None:
    batch = batch_of(np.random.default_rng(3), 400)
    measured = truth(batch) * np.where(np.arange(400) < 200, 2.0, 1.0)
    coefficients, _ = fit_terms(timed(batch, measured), np.where(np.arange(400) < 200, 1e-3, 1.0))
    assert error(batch, coefficients) < 0.05


def test_correction_finds_a_smooth_factor() -> None:
    random = np.random.default_rng(4)
    batch = batch_of(random, 1500)
    logs = logs_of(batch)
    factor = 0.3 * np.sin(logs[:, 2])  # of the number of decodes
    correction = fit_correction(logs, factor - np.median(factor) + 0.05 * random.standard_normal(1500), np.ones(1500))
    assert correction.shape == (LOG_FEATURES, KNOTS)
    found = sum(np.interp(logs[:, at], np.arange(KNOTS), correction[at]) for at in range(LOG_FEATURES))
    residual = factor - found
    assert np.std(residual) < 0.25 * np.std(factor)


def test_correction_of_nothing_is_nothing() -> None:
    batch = batch_of(np.random.default_rng(5), 200)
    assert not fit_correction(logs_of(batch), np.zeros(200), np.ones(200)).any()


def test_correction_is_bounded() -> None:
    batch = batch_of(np.random.default_rng(6), 200)
    wild = fit_correction(logs_of(batch), 9.0 * np.sign(logs_of(batch)[:, 2] - 2.0), np.ones(200))
    assert np.abs(wild).max() <= MAX_CORRECTION


def test_weighted_quantile() -> None:
    values = np.array([3.0, 1.0, 2.0])
    assert weighted_quantile(values, np.ones(3), 0.5) == 2.0
    assert weighted_quantile(values, np.array([9.0, 1.0, 1.0]), 0.5) == 3.0
    assert weighted_quantile(np.array([]), np.array([]), 0.5) == 0.0
