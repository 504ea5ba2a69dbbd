from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import LatencyModel, Snapshot, Terms
from learner.columns import DECODE, LOG_FEATURES, MIXED, PHASES, TERM_COLUMNS, TERMS
from learner.contention import CONTENTION_COLUMNS, CONTENTION_TERMS
from learner.nearby import INERTIA, MOST_CUT, MOST_POINTS, POINT_WIDTH, RADIUS
from learner.sizes import MOST_SHIFT, MOST_SIZES
from learner.snapshot import COLD_MARGIN, GROUPS, KNOTS, MAX_CORRECTION
from tests.learner.test_roofline import SHAPE, Request, requests
from tests.learner.worlds import CPU, H200, LARGE

MODEL = LatencyModel(SHAPE, H200)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Sound snapshots with numbers anywhere inside the bounds."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Counts cost microseconds; times are multiples of themselves.
    unit = np.array([1.0 if name.endswith("_s") else 1e-5 for name in TERM_COLUMNS])
    low = random.uniform(0.01, 0.5, GROUPS)
    # Small ones, which drawn batches often have.
    sizes = np.sort(random.choice(np.r_[-80.0:0.0, 1.0:81.0], draw(st.integers(0, 2 * MOST_SIZES)), replace=False))
    return Snapshot(
        version=draw(st.integers(1, 1000)),
        coefficients=(unit * random.exponential(1.0, TERMS) * (random.random(TERMS) < 0.6)).tolist(),
        contention=(0.3 * random.exponential(1.0, CONTENTION_TERMS) * [1e-4, *[1] * 10]).tolist(),
        correction=random.uniform(-0.3, 0.3, LOG_FEATURES * KNOTS).tolist(),
        correction_weight=random.choice([0.0, 1.0], GROUPS).tolist(),
        nearby=nearby_points(random, draw(st.integers(0, MOST_POINTS))),
        nearby_weight=random.choice([0.0, 1.0], GROUPS).tolist(),
        sizes=sizes.tolist(),
        size_shift=random.uniform(-MOST_SHIFT, MOST_SHIFT, len(sizes)).tolist(),
        offset=random.uniform(-1.0, 1.0, GROUPS).tolist(),
        margin=random.uniform(1.0, 2.0, GROUPS).tolist(),
        settled_margin=float(random.uniform(1.0, 2.0)),
        min_ratio=low.tolist(),
        max_ratio=(low * 10.0 ** random.uniform(0.0, 3.0, GROUPS)).tolist(),
        floor_s=(random.exponential(1e-3, GROUPS) * (random.random(GROUPS) < 0.4)).tolist(),
        drifting=random.choice([0.0, 1.0], GROUPS).tolist(),
    )


def nearby_points(random: np.random.Generator, count: int) -> list[float]:
    """Points around where small batches lie, so that some are near."""
    rows = np.empty((count, POINT_WIDTH))
    rows[:, :LOG_FEATURES] = random.uniform(0.0, 12.0, (count, LOG_FEATURES)) * random.integers(0, 2, LOG_FEATURES)
    rows[:, LOG_FEATURES] = random.integers(0, GROUPS, count)
    rows[:, LOG_FEATURES + 1] = random.uniform(-MOST_CUT, MOST_CUT, count)
    rows[:, LOG_FEATURES + 2] = random.uniform(0.0, 1.0, count)
    return rows.ravel().tolist()


def nearby_shift(snapshot: Snapshot, logs: np.ndarray, group: int) -> float:
    """The kernel average by its definition."""
    top, bottom = 0.0, INERTIA
    for *place, of, residual, weight in np.array(snapshot.nearby).reshape(-1, POINT_WIDTH).tolist():
        distance = float(((np.array(place) - logs) ** 2).sum())
        like = max(1.0 - distance / RADIUS**2, 0.0) ** 4 * weight * (of == group)
        top, bottom = top + like * residual, bottom + like
    return top / bottom


batches = st.lists(requests, min_size=1, max_size=6)


def terms_of(batch: list[Request], tpcs: object) -> Terms:
    q, c = np.array(batch).T
    return MODEL.terms(q, c, int((q > 0).sum()), tpcs)  # type: ignore[arg-type]


@given(batches)
def test_without_a_snapshot_it_is_the_roofline(batch: list[Request]) -> None:
    terms = terms_of(batch, [1, 20, 66])
    predicted = MODEL.predict(terms)
    np.testing.assert_allclose(predicted.mean_s, terms.roofline_s, rtol=1e-12)
    np.testing.assert_allclose(predicted.upper_s, COLD_MARGIN * terms.roofline_s, rtol=1e-12)
    assert MODEL.version == 0
    assert MODEL.total_tpcs == 66


@given(snapshots(), batches)
def test_never_slower_with_more_tpcs(snapshot: Snapshot, batch: list[Request]) -> None:
    predicted = MODEL.with_snapshot(snapshot).predict(terms_of(batch, np.arange(1, 67)))
    for column in predicted:
        assert (np.diff(column) <= 1e-9 * column[:-1]).all()


@given(snapshots(), batches, batches, st.integers(1, 66))
def test_never_slower_with_more_tpcs_beside_another(
    snapshot: Snapshot, batch: list[Request], other: list[Request], other_tpcs: int
) -> None:
    model = MODEL.with_snapshot(snapshot)
    beside = terms_of(other, other_tpcs)
    for low, high in ((1, 66 - other_tpcs), (67 - other_tpcs, 66)):  # disjoint sets of TPCs, then overlapping ones
        predicted = model.predict(terms_of(batch, np.arange(low, max(low, high) + 1)), beside)
        for column in predicted:
            assert (np.diff(column) <= 1e-9 * column[:-1]).all()


@given(snapshots(), batches)
def test_stays_within_the_bounds(snapshot: Snapshot, batch: list[Request]) -> None:
    terms = terms_of(batch, [1, 7, 66])
    predicted = MODEL.with_snapshot(snapshot).predict(terms)
    phase = int(terms.column("phase")[0])
    assert (predicted.mean_s >= snapshot.min_ratio[phase] * terms.roofline_s * (1 - 1e-12)).all()
    assert (predicted.mean_s >= snapshot.floor_s[phase] * (terms.roofline_s > 0.0)).all()
    most_s = np.maximum(snapshot.max_ratio[phase] * terms.roofline_s * (1 + 1e-12), snapshot.floor_s[phase])
    assert (predicted.mean_s <= most_s).all()
    least_s = COLD_MARGIN * snapshot.drifting[phase] * terms.roofline_s
    np.testing.assert_allclose(predicted.upper_s, np.maximum(predicted.mean_s * snapshot.margin[phase], least_s))
    assert (predicted.upper_s >= predicted.mean_s).all()
    assert predicted.roofline_s is terms.roofline_s


@given(snapshots(), batches, batches)
def test_in_drift_the_safer_of_learner_and_roofline_bounds(
    snapshot: Snapshot, batch: list[Request], other: list[Request]
) -> None:
    terms, beside = terms_of(batch, [1, 16, 40]), terms_of(other, 26)
    calm, drifting = (
        MODEL.with_snapshot(msgspec.structs.replace(snapshot, drifting=[value] * GROUPS)) for value in (0.0, 1.0)
    )
    for of in (None, beside):
        learner, safer = calm.predict(terms, of), drifting.predict(terms, of)
        np.testing.assert_array_equal(safer.mean_s, learner.mean_s)
        np.testing.assert_array_equal(safer.upper_s, np.maximum(learner.upper_s, COLD_MARGIN * terms.roofline_s))


@given(snapshots(), batches, st.integers(1, 4))
def test_padding_costs_nothing(snapshot: Snapshot, batch: list[Request], padding: int) -> None:
    model = MODEL.with_snapshot(snapshot)
    padded = model.predict(terms_of([*batch, *[(0, 123)] * padding], [3, 66]))
    for column, expected in zip(padded, model.predict(terms_of(batch, [3, 66])), strict=True):
        np.testing.assert_allclose(column, expected, rtol=1e-9)


@given(snapshots(), st.lists(batches, min_size=2, max_size=5), batches)
def test_rows_do_not_see_each_other(snapshot: Snapshot, rows: list[list[Request]], other: list[Request]) -> None:
    model = MODEL.with_snapshot(snapshot)
    width = max(map(len, rows))
    q = np.array([[q for q, _ in row] + [0] * (width - len(row)) for row in rows])
    c = np.array([[c for _, c in row] + [0] * (width - len(row)) for row in rows])
    tpcs = np.arange(len(rows)) * 7 + 1
    together = model.terms(q, c, 1, tpcs)
    beside = terms_of(other, 30)
    for at in range(len(rows)):
        alone = model.terms(q[at], c[at], 1, tpcs[at])
        for other_terms in (None, beside):
            mean = model.predict(together, other_terms).mean_s[at]
            np.testing.assert_allclose(mean, model.predict(alone, other_terms).mean_s[0])
        np.testing.assert_allclose(model.predict(together.take([at])).upper_s, model.predict(alone).upper_s)


def test_a_stream_beside_counts_as_much_as_it_runs() -> None:
    own, other = terms_of([(1, 2000)] * 8, [16]), terms_of([(4096, 0)], [50])
    alone_s, beside_s = MODEL.predict(own).mean_s[0], MODEL.predict(own, other).mean_s[0]
    assert MODEL.predict(own, other, 1.0).mean_s[0] == pytest.approx(beside_s)
    assert MODEL.predict(own, other, 0.0).mean_s[0] == pytest.approx(alone_s)
    half_s = MODEL.predict(own, other, 0.5).mean_s[0]
    assert alone_s < half_s < beside_s
    assert half_s - alone_s == pytest.approx((beside_s - alone_s) / 2)


def reference(snapshot: Snapshot, terms: Terms, beside: Terms | None) -> list[float]:
    """The mean by its definition, one forward at a time."""
    out = []
    for row in range(len(terms)):
        mean = sum(a * b for a, b in zip(snapshot.coefficients, terms.matrix[row, :TERMS], strict=True))
        group = int(terms.column("phase")[row])
        if beside is not None:
            columns = MODEL.contention_columns(terms.take([row]), beside.take([row if len(beside) > 1 else 0]))
            mean += float(np.dot(snapshot.contention, columns[:, 0]))
            group += len(PHASES) * int(columns[0, 0])
        correction = 0.0
        for feature, x in enumerate(terms.matrix[row, -LOG_FEATURES:]):
            knots = snapshot.correction[feature * KNOTS : (feature + 1) * KNOTS]
            correction += float(np.interp(x, np.arange(KNOTS), knots))
        correction = min(max(correction, -MAX_CORRECTION), MAX_CORRECTION)
        mean *= np.exp(snapshot.offset[group] + snapshot.correction_weight[group] * correction)
        shift = nearby_shift(snapshot, terms.matrix[row, -LOG_FEATURES:], group)
        mean *= np.exp(snapshot.nearby_weight[group] * shift)
        tokens = terms.column("prefill_tokens")[row] + terms.column("decode_rows")[row]
        size = {MIXED: tokens, DECODE: -tokens}.get(group)
        if size in snapshot.sizes:
            mean *= np.exp(snapshot.size_shift[snapshot.sizes.index(size)])
        roofline = terms.roofline_s[row]
        mean = min(max(mean, snapshot.min_ratio[group] * roofline), snapshot.max_ratio[group] * roofline)
        out.append(max(mean, snapshot.floor_s[group] if roofline else 0.0))
    return out


@settings(max_examples=50)
@given(snapshots(), batches, batches)
def test_mean_is_the_documented_sum(snapshot: Snapshot, batch: list[Request], other: list[Request]) -> None:
    model = MODEL.with_snapshot(snapshot)
    terms, beside = terms_of(batch, [1, 16, 50, 66]), terms_of(other, [20])
    np.testing.assert_allclose(model.predict(terms).mean_s, reference(snapshot, terms, None), rtol=1e-9)
    np.testing.assert_allclose(model.predict(terms, beside).mean_s, reference(snapshot, terms, beside), rtol=1e-9)


def test_contention_before_anything_is_learnt() -> None:
    """Decode slows down by 20–30 % and prefill by 15–20 % beside each other on disjoint TPCs; more on shared ones."""
    model = LatencyModel(LARGE, H200)
    decode, prefill = model.terms([1] * 32, [2048] * 32, 32, 16), model.terms([8192], [0], 1, 50)
    assert 1.15 < model.predict(decode, prefill).mean_s[0] / model.predict(decode).mean_s[0] < 1.35
    assert 1.1 < model.predict(prefill, decode).mean_s[0] / model.predict(prefill).mean_s[0] < 1.3
    everywhere = model.terms([1] * 32, [2048] * 32, 32, 66)
    assert model.predict(prefill, everywhere).mean_s[0] > 1.5 * model.predict(prefill).mean_s[0]
    nothing = model.terms([0], [0], 0, 16)
    np.testing.assert_array_equal(model.predict(prefill, nothing).mean_s, model.predict(prefill).mean_s)
    assert model.predict(nothing, prefill).upper_s[0] == 0.0


def test_contention_columns() -> None:
    model = LatencyModel(LARGE, H200)
    own = model.terms([1] * 32, [2048] * 32, 32, [16, 17, 50])
    other = model.terms([4096], [0], 1, 50)
    columns = dict(zip(CONTENTION_COLUMNS, model.contention_columns(own, other), strict=True))
    np.testing.assert_array_equal(columns["beside_forward"], [1.0, 1.0, 1.0])
    # Launching a prefill takes 1 ms for each layer, meanwhile the device is idle or not.
    computing_s = other.column("compute_s")
    busy = computing_s / (computing_s + 1e-3 * LARGE.layers)
    np.testing.assert_allclose(columns["decode_compute_s"], busy * own.column("compute_s"))
    np.testing.assert_allclose(columns["decode_memory_s"], busy * own.column("memory_s"))
    demand = other.column("memory_whole_s") / other.roofline_s
    np.testing.assert_allclose(columns["decode_bandwidth_s"], busy * own.column("memory_s") * demand)
    # The other holds 50 of 66: 16 are disjoint, from 17 on some are shared and 16 are exclusive.
    exclusive = model.terms([1] * 32, [2048] * 32, 32, 16)
    for name in ("compute_s", "memory_s"):
        expected = [0.0, exclusive.column(name)[0], exclusive.column(name)[0]]
        np.testing.assert_allclose(columns[f"decode_shared_{name}"], busy * expected)
    assert not any(columns[name].any() for name in CONTENTION_COLUMNS if name.startswith("prefill"))
    # Decode steps are graphs, which keep the device busy.
    beside_step = dict(zip(CONTENTION_COLUMNS, model.contention_columns(other, own.take([0])), strict=True))
    np.testing.assert_allclose(beside_step["prefill_compute_s"], computing_s)
    assert not any(beside_step[name].any() for name in CONTENTION_COLUMNS if name.startswith("decode"))


def test_contexts_beyond_every_knot_are_predicted() -> None:
    snapshot = msgspec.structs.replace(
        Snapshot.roofline(), version=1, correction=[0.1] * (LOG_FEATURES * KNOTS), correction_weight=[1.0] * GROUPS
    )
    model = LatencyModel(LARGE, CPU, snapshot)
    predicted = model.predict(model.terms([1, 2**40], [2**50, 0], 1, 1))
    assert np.isfinite(predicted.upper_s).all()


def test_an_unsound_snapshot_is_refused() -> None:
    bad = msgspec.structs.replace(Snapshot.roofline(), coefficients=[-1.0] * TERMS)
    with pytest.raises(ValueError, match="coefficients"):
        LatencyModel(SHAPE, H200, bad)
    with pytest.raises(ValueError, match="coefficients"):
        MODEL.with_snapshot(bad)


def test_a_new_snapshot_leaves_the_old_model_alone() -> None:
    before = MODEL.predict(terms_of([(1, 50)], 9)).mean_s
    newer = MODEL.with_snapshot(msgspec.structs.replace(Snapshot.roofline(), version=7, offset=[0.5] * GROUPS))
    assert (newer.version, MODEL.version) == (7, 0)
    np.testing.assert_array_equal(MODEL.predict(terms_of([(1, 50)], 9)).mean_s, before)
    assert newer.predict(terms_of([(1, 50)], 9)).mean_s[0] > before[0]


def test_importing_it_is_light() -> None:
    code = "import sys, learner.estimator; print(sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "learner" in done.stdout
    assert not {"sklearn", "scipy", "matplotlib", "torch", "zmq"} & set(eval(done.stdout))
