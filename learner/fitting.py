"""Robust fits of a latency model's numbers to timed forwards: plain functions of arrays, scikit-learn inside."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import numpy as np
import numpy.typing as npt

from learner.columns import LINEAR_COLUMNS, LOG_COLUMNS, LOG_FEATURES, TERM_COLUMNS, TERMS
from learner.contention import CONTENTION_TERMS
from learner.snapshot import GROUPS, KNOTS, MAX_COEFFICIENT, MAX_CORRECTION, MAX_RATIO, MIN_RATIO, Snapshot
from learner.window import Batch

FloatArray = npt.NDArray[np.float64]

# Terms that are fitted, each the sum of some columns, with the strength of its prior in samples. What only tells
# itself from the others once S varies is held strongly.
_FITTED: tuple[tuple[tuple[str, ...], float], ...] = (
    (LINEAR_COLUMNS, 1.0),
    (("elementwise_s",), 1.0),
    (("attention_prefill_s",), 1.0),
    (("attention_decode_s",), 1.0),
    (("classifier_s",), 1.0),
    (("all_reduce_s",), 1.0),
    (("linear_compute_s",), 1.0),
    (("linear_read_s",), 1.0),
    (("attention_causal_s",), 1.0),
    (("attention_padded_s",), 1.0),
    (("compute_whole_s",), 8.0),
    (("memory_whole_s",), 8.0),
    (("compute_partition_s",), 4.0),
    (("memory_partition_s",), 4.0),
    (("attention_decode_partition_s",), 4.0),
    (("prefill_rows",), 1.0),
    (("decode_rows",), 1.0),
    (("logits_rows",), 1.0),
    (("prefill_forward",), 0.5),
    (("forward",), 0.5),
)
_CONTENTION_PRIOR = 2.0
_ITERATIONS = 3
_HUBER, _FAR = 1.345, 6.0
_LEAST_SCALE = 0.02
# Means stay within these quantiles of measured / roofline, and a factor.
_RATIO_QUANTILE, _RATIO_SLACK = 0.005, 4.0
# Pseudo-samples that hold neighbouring knots together, and each knot at zero.
_SMOOTHNESS, _SHRINKAGE = 6.0, 1.0


@cache
def _groupings() -> tuple[FloatArray, list[int], FloatArray]:
    """[TERMS, fitted] matrix that sums columns; the first column of each fitted term; prior strengths."""
    sums = np.zeros((TERMS, len(_FITTED)))
    for index, (names, _) in enumerate(_FITTED):
        for name in names:
            sums[TERM_COLUMNS.index(name), index] = 1.0
    first = [TERM_COLUMNS.index(names[0]) for names, _ in _FITTED]
    return sums, first, np.array([strength for _, strength in _FITTED])


def fit_terms(batch: Batch, weights: FloatArray, prior: Snapshot | None = None) -> tuple[FloatArray, FloatArray]:
    """Coefficients of the terms [TERMS] and of contention [CONTENTION_TERMS], none negative.

    Minimises squared relative errors, each error's influence bounded (Huber) and the relative error taken to the
    fitted time, so that neither slow forwards nor outliers outweigh the rest. ``weights`` [n] are sample weights.
    A first fit of few terms finds the device's general ratio to the ``prior``'s mean (None: the roofline's); the full
    fit is drawn towards the prior's coefficients times that, so a term without evidence keeps the ratio.
    """
    sums, first, strengths = _groupings()
    terms = batch.columns[:, :TERMS]
    known = prior or Snapshot.roofline()
    coefficients, contention = np.array(known.coefficients), np.array(known.contention)
    few = np.stack(
        [
            batch.roofline_s if prior is None else terms @ coefficients + batch.contention @ contention,
            terms[:, TERM_COLUMNS.index("forward")],
            terms[:, TERM_COLUMNS.index("prefill_forward")],
            terms[:, TERM_COLUMNS.index("prefill_rows")] + terms[:, TERM_COLUMNS.index("decode_rows")],
        ],
        axis=1,
    )
    few_prior = np.array([1.0, 0.0, 0.0, 0.0])
    coarse = _robust_nonnegative(few, batch.measured_s, weights, few_prior, np.full(4, 0.2), None)
    towards = np.concatenate([coefficients[first], contention]) * coarse[0]
    design = np.concatenate([terms @ sums, batch.contention], axis=1)
    strength = np.concatenate([strengths, np.full(CONTENTION_TERMS, _CONTENTION_PRIOR)])
    fine = _robust_nonnegative(design, batch.measured_s, weights, towards, strength, few @ coarse)
    fine = np.minimum(fine, MAX_COEFFICIENT)
    return sums @ fine[: len(_FITTED)], fine[len(_FITTED) :]


def _robust_nonnegative(
    design: FloatArray,
    measured: FloatArray,
    weights: FloatArray,
    prior: FloatArray,
    strength: FloatArray,
    start: FloatArray | None,
) -> FloatArray:
    """Iteratively reweighted non-negative ridge: argmin Σ w h ((y − Xβ) / ŷ)² + Σ strength (scale (β − prior))².

    ``scale`` of a column is its root mean square in units of ŷ where it is not zero, so a prior is worth ``strength``
    samples. A column of zeros keeps its prior.
    """
    fitted = measured if start is None else start
    floor = 1e-3 * measured
    coefficients = prior
    present = design > 0.0
    count = np.maximum(weights @ present, 1e-9)
    for _ in range(_ITERATIONS):
        fitted = np.maximum(fitted, floor)
        error = measured / fitted - 1.0
        scale = max(_LEAST_SCALE, 1.4826 * weighted_quantile(np.abs(error), weights, 0.5))
        robust = weights * _robust_weights(error, scale)
        relative = design / fitted[:, None]
        scales = np.sqrt(weights @ (relative * relative) / count)
        used = scales > 0.0
        unit = relative[:, used] / scales[used]
        gram = (unit * robust[:, None]).T @ unit
        target = unit.T @ (robust * measured / fitted)
        gram[np.diag_indices_from(gram)] += strength[used]
        target += strength[used] * prior[used] * scales[used]
        coefficients = prior.copy()
        coefficients[used] = _nonnegative(gram, target) / scales[used]
        fitted = design @ coefficients
    return coefficients


def _robust_weights(error: FloatArray, scale: float) -> FloatArray:
    """Huber's weights, and beyond _FAR scales less still, so that the influence of an error falls with its size."""
    size = np.maximum(np.abs(error) / scale, 1e-12)
    return np.minimum(1.0, _HUBER / size) * np.minimum(1.0, _FAR / size)


def _nonnegative(gram: FloatArray, target: FloatArray) -> FloatArray:
    """argmin over x ≥ 0 of ½ xᵀ gram x − targetᵀ x, by its Cholesky factor as least squares."""
    from sklearn.linear_model import LinearRegression

    factor = np.linalg.cholesky(gram)
    with _quick():
        model = LinearRegression(positive=True, fit_intercept=False).fit(factor.T, np.linalg.solve(factor, target))
    return np.asarray(model.coef_, dtype=np.float64)


def _quick() -> AbstractContextManager[None]:
    """scikit-learn without its checks of inputs, which cost more than these small fits and are done on the way in."""
    from sklearn import config_context

    context: AbstractContextManager[None] = config_context(assume_finite=True, skip_parameter_validation=True)
    return context


def fit_correction(logs: FloatArray, residual: FloatArray, weights: FloatArray) -> FloatArray:
    """Smooth additive log factors of the log features, [LOG_FEATURES, KNOTS].

    ``logs`` [n, LOG_FEATURES] is log2(1 + x); ``residual`` [n] is log(measured / fitted), centred per group. Piecewise
    linear, neighbouring knots held together, all of it drawn to zero; knots beyond what was seen repeat the last one.
    """
    from sklearn.linear_model import Ridge

    position = np.minimum(logs, KNOTS - 1.001)
    knot = position.astype(np.intp)
    fraction = position - knot
    pieces: list[FloatArray] = []
    ranges: list[tuple[int, int]] = []
    rows = np.arange(residual.size)
    for feature in range(LOG_FEATURES):
        first, last = int(knot[:, feature].min()), int(knot[:, feature].max()) + 1
        hats = np.zeros((residual.size, last - first + 1))
        hats[rows, knot[:, feature] - first] = 1.0 - fraction[:, feature]
        hats[rows, knot[:, feature] - first + 1] += fraction[:, feature]
        # θ with penalty θᵀKθ is ridge on φ = Lᵀθ, where K = LLᵀ.
        pieces.append(np.asarray(np.linalg.solve(_penalty_factor(last - first + 1), hats.T).T, dtype=np.float64))
        ranges.append((first, last))
    design = np.concatenate(pieces, axis=1)
    error = residual
    coefficients = np.zeros(design.shape[1])
    for _ in range(2):
        scale = max(_LEAST_SCALE, 1.4826 * weighted_quantile(np.abs(error), weights, 0.5))
        robust = weights * _robust_weights(error, scale)
        centred = design - robust @ design / robust.sum()
        gram = (centred * robust[:, None]).T @ centred
        # Knots that nothing fell on leave rows of zeros, which only the ridge below would lift.
        gram[np.diag_indices_from(gram)] += 1e-8 * np.trace(gram) / len(gram) + 1e-12
        factor = np.linalg.cholesky(gram)
        with _quick():
            ridge = Ridge(alpha=1.0, fit_intercept=False, solver="cholesky")
            ridge.fit(factor.T, np.linalg.solve(factor, centred.T @ (robust * residual)))
        coefficients = np.asarray(ridge.coef_, dtype=np.float64)
        error = residual - centred @ coefficients
    out = np.zeros((LOG_FEATURES, KNOTS))
    at = 0
    for feature, (first, last) in enumerate(ranges):
        size = last - first + 1
        out[feature, first : last + 1] = np.linalg.solve(_penalty_factor(size).T, coefficients[at : at + size])
        out[feature, :first] = out[feature, first]
        out[feature, last + 1 :] = out[feature, last]
        at += size
    return np.clip(out, -MAX_CORRECTION, MAX_CORRECTION)


@cache
def _penalty_factor(knots: int) -> FloatArray:
    """Cholesky factor of the penalty on first differences and on size, [knots, knots]."""
    differences = np.diff(np.eye(knots), axis=0)
    penalty = _SMOOTHNESS * differences.T @ differences + _SHRINKAGE * np.eye(knots)
    return np.asarray(np.linalg.cholesky(penalty))


def ratio_bounds(batch: Batch, enough: int) -> tuple[list[float], list[float]]:
    """Least and largest mean / roofline by group: its own with ``enough`` samples, else those of all, twice as wide."""
    ratio = batch.measured_s / batch.roofline_s
    least, largest = [], []
    for group in range(GROUPS):
        own = ratio[batch.group == group]
        values, slack = (own, _RATIO_SLACK) if own.size >= enough else (ratio, 2.0 * _RATIO_SLACK)
        low, high = np.quantile(values, [_RATIO_QUANTILE, 1.0 - _RATIO_QUANTILE])
        least.append(min(max(float(low) / slack, MIN_RATIO), MAX_RATIO))
        largest.append(min(max(float(high) * slack, MIN_RATIO), MAX_RATIO))
    return least, largest


def weighted_quantile(values: FloatArray, weights: FloatArray, level: float) -> float:
    """Smallest value with at least ``level`` of the weight at or below it; 0 for no values."""
    if not values.size:
        return 0.0
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order[min(int(np.searchsorted(total, level * total[-1])), values.size - 1)]])


def logs_of(batch: Batch) -> FloatArray:
    """The log features of a batch, [n, LOG_FEATURES]."""
    return batch.columns[:, LOG_COLUMNS]
