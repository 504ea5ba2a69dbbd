from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import DeviceProfile, LatencyModel, Snapshot
from learner.columns import COLUMNS
from learner.decodes import DecodeBatch, Decoding, growth
from tests.learner.test_latency import MODEL, snapshots, terms_of
from tests.learner.test_roofline import DEVICES as ROOFLINE_DEVICES
from tests.learner.test_roofline import SHAPE, requests

# In bytes, what one pair's FLOPs take on so many TPCs: less than the 1920 of one token of context, then a little more,
# so that a decode's F exceeds its B from no context on, from 15 360, from 1 024 and from 256 tokens.
PAIR_BYTES = (1850.0, 1921.0, 1935.0, 1980.0)
BALANCED = DeviceProfile(
    name="balanced",
    tpcs=4,
    flops=tuple((s, s * 1e12) for s in (1.0, 2.0, 3.0, 4.0)),
    bandwidth=tuple((s, s * 1e12 * of / 15456.0) for s, of in zip((1.0, 2.0, 3.0, 4.0), PAIR_BYTES, strict=True)),
    link_bandwidth=1e9,
)
DEVICES = {**ROOFLINE_DEVICES, "balanced": BALANCED}

contexts = st.lists(st.integers(1, 200_000), max_size=12)


@settings(max_examples=150)
@given(data=st.data(), device=st.sampled_from(sorted(DEVICES)), tp=st.sampled_from([1, 2, 16]), running=contexts)
def test_summed_and_listed_decodes_cost_the_same(data: st.DataObject, device: str, tp: int, running: list[int]) -> None:
    profile = DEVICES[device]
    n = data.draw(st.integers(0, 4))
    batches = data.draw(st.lists(st.lists(requests, min_size=n, max_size=n), min_size=1, max_size=5))
    m = len(batches)
    each = st.lists(st.integers(1, profile.tpcs), min_size=m, max_size=m)
    tpcs, logits = data.draw(each), data.draw(st.integers(0, 9))
    share = np.array(data.draw(st.lists(st.booleans(), min_size=m, max_size=m)), dtype=float)
    grown = np.array(data.draw(st.lists(st.integers(0, 300), min_size=m, max_size=m)), dtype=float)
    table = np.array(batches, dtype=float).reshape(m, n, 2)
    q, c = table[..., 0], table[..., 1]
    model = LatencyModel(msgspec.structs.replace(SHAPE, tp=tp), profile)
    summed = model.terms(q, c, logits, tpcs, Decoding(DecodeBatch(running), growth(share, grown)))
    decode_q = np.repeat(share[:, None], len(running), axis=1)
    decode_c = np.array(running, dtype=float) + grown[:, None]
    listed = model.terms(np.hstack([decode_q, q]), np.hstack([decode_c, c]), logits, tpcs)
    for name in COLUMNS:
        np.testing.assert_allclose(
            summed.column(name), listed.column(name), rtol=1e-9, atol=1e-18, err_msg=f"{name} on {device}"
        )
    np.testing.assert_allclose(summed.roofline_s, listed.roofline_s, rtol=1e-9)


@given(contexts, st.lists(st.floats(-10.0, 250_000.0), min_size=1, max_size=6))
def test_beyond_counts_and_sums(running: list[int], limits: list[float]) -> None:
    count, total = DecodeBatch(running).beyond(np.array(limits))
    assert count.tolist() == [sum(c > limit for c in running) for limit in limits]
    assert total.tolist() == [sum(c for c in running if c > limit) for limit in limits]


def test_each_decode_is_bound_by_its_own_side() -> None:
    """Where the FLOPs of long contexts take longer than their bytes, they do not hide what short ones have to read."""
    model, running = LatencyModel(SHAPE, BALANCED), [100, 500, 5000, 40_000]
    tpcs = np.arange(1, 5)
    batch, grown = DecodeBatch(running), 600
    summed = model.terms(np.zeros((4, 0)), np.zeros(0), 0, tpcs, Decoding(batch, growth(1, grown)))
    each = [model.terms([1], [context + grown], 0, tpcs).column("attention_decode_s") for context in running]
    np.testing.assert_allclose(summed.column("attention_decode_s"), np.sum(each, axis=0), rtol=1e-12)
    reading = 15360.0 + 1920.0 * (np.array(running) + grown + 1.0)
    computing = np.array(PAIR_BYTES)[:, None] * (np.array(running) + grown + 1.0)
    assert (computing > reading).sum(axis=1).tolist() == [0, 1, 3, 4]
    expected = np.maximum(reading, computing).sum(axis=1) / BALANCED.bandwidth_at(tpcs)
    np.testing.assert_allclose(summed.column("attention_decode_s"), expected, rtol=1e-12)


@given(snapshots(), st.data())
def test_pairs_are_predicted_like_rows_beside_rows(snapshot: Snapshot, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 4))
    batches = data.draw(st.lists(st.lists(requests, min_size=n, max_size=n), min_size=1, max_size=6))
    table, m = np.array(batches), len(batches)
    tpcs = data.draw(st.lists(st.integers(1, 66), min_size=m, max_size=m))
    terms = MODEL.terms(table[..., 0], table[..., 1], 1, tpcs)
    rows = st.lists(st.integers(0, m - 1), min_size=8, max_size=8).map(np.array)
    own, beside = data.draw(rows), data.draw(rows)
    for model in (MODEL, MODEL.with_snapshot(snapshot)):
        pairs = model.predict_pairs(terms, own, beside)
        for got, expected in zip(pairs, model.predict(terms.take(own), terms.take(beside)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_a_growth_may_be_one_for_all_forwards() -> None:
    batch = DecodeBatch([100, 2000])
    many = MODEL.terms([[50], [0]], [[7], [0]], 2, [8, 66], Decoding(batch, growth([1, 1], 3)))
    one = MODEL.terms([[50], [0]], [[7], [0]], 2, [8, 66], Decoding(batch, growth(1, 3)))
    np.testing.assert_array_equal(many.matrix, one.matrix)
    alone = terms_of([(1, 103), (1, 2003)], 66)
    np.testing.assert_allclose(many.column("memory_s")[1], alone.column("memory_s")[0])
