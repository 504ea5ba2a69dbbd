from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import DeviceProfile, LatencyModel, Snapshot
from learner.outlook import Following
from learner.pairs import Pairs
from tests.learner.listed import ListedOutlook
from tests.learner.test_latency import snapshots
from tests.learner.test_roofline import DEVICES as ROOFLINE_DEVICES
from tests.learner.test_roofline import SHAPE

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
prompts = st.lists(st.tuples(st.integers(1, 9000) | st.just(1), st.just(0) | st.integers(0, 50_000)), max_size=5)


@st.composite
def batches(draw: st.DrawFn, new: list[int], most: int, least: int = 0) -> tuple[list[int], list[int]]:
    """Batches of the first of some prompts: how many whole, and how much of the next."""
    whole, part = [], []
    for _ in range(draw(st.integers(least, most))):
        whole.append(draw(st.integers(0, len(new))))
        part.append(draw(st.integers(0, new[whole[-1]] - 1)) if whole[-1] < len(new) else 0)
    return whole, part


graphs = st.sampled_from([(), (64, 500, 2000)])


def close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-18)


@settings(max_examples=150)
@given(
    st.data(), st.sampled_from(sorted(DEVICES)), st.sampled_from([1, 2, 16]), graphs, prompts, contexts, st.booleans()
)
def test_it_says_what_the_model_says_of_the_same_requests(data, device, tp, sizes, waiting, running, learnt) -> None:
    shape = msgspec.structs.replace(SHAPE, tp=tp, graph_tokens=sizes)
    model = LatencyModel(shape, DEVICES[device], data.draw(snapshots()) if learnt else None)
    new, cached = (np.array([prompt[at] for prompt in waiting], dtype=np.int64) for at in (0, 1))
    whole, part = data.draw(batches(new.tolist(), 6))
    prefills = data.draw(st.integers(0, len(whole)))
    following = Following(data.draw(st.integers(0, len(new))), data.draw(st.integers(0, 300)))
    after = data.draw(st.just(None) | st.just(following))
    if after is not None:
        whole[prefills:prefills], part[prefills:prefills] = [0, 0], [0, 0]
    asked = np.array(whole, dtype=np.int64), np.array(part, dtype=np.int64), prefills, after
    times = model.outlook(new, cached, np.array(running)).predict(*asked)
    close(times, ListedOutlook(model, new, cached, np.array(running)).predict(*asked))


@settings(max_examples=150)
@given(
    st.data(),
    st.sampled_from(sorted(set(DEVICES) - {"cpu"})),
    graphs,
    prompts.filter(bool),
    contexts.filter(bool),
    st.booleans(),
)
def test_pairs_are_predicted_like_one_forward_beside_another(data, device, graphs, waiting, running, learnt) -> None:
    profile, shape = DEVICES[device], msgspec.structs.replace(SHAPE, graph_tokens=graphs)
    model = LatencyModel(shape, profile, data.draw(snapshots()) if learnt else None)
    new, cached = (np.array([prompt[at] for prompt in waiting], dtype=np.int64) for at in (0, 1))
    sizes = data.draw(batches(new.tolist(), 3, 1).filter(lambda of: all(w or p for w, p in zip(*of, strict=True))))
    others = data.draw(batches(new.tolist(), 3))
    whole, part = ([*first, 0, 0, *second] for first, second in zip(sizes, others, strict=True))
    # Half of a window never has the whole device, where a prefill would be a graph.
    tpcs = st.lists(st.integers(1, profile.tpcs - bool(graphs)), min_size=4, max_size=4)
    pairs = Pairs(np.array(data.draw(tpcs)), np.array(data.draw(tpcs)), len(sizes[0]))
    following = Following(data.draw(st.integers(0, len(new))), data.draw(st.integers(0, 300)))
    asked = np.array(whole), np.array(part, dtype=np.int64), pairs.sizes, following, pairs
    listed = ListedOutlook(model, new, cached, np.array(running))
    expected, expected_beside = listed.predict(*asked), listed.beside()
    outlook = model.outlook(new, cached, np.array(running))
    for _ in range(2):
        times = outlook.predict(*asked)
        close(times[:, 1:], expected[:, 1:])
        assert (times[:, 0] <= expected[:, 0] * (1 + 1e-9)).all()
        close(outlook.beside(), expected_beside)


def test_nothing_costs_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    model = LatencyModel(SHAPE, DEVICES["h200"], msgspec.structs.replace(Snapshot.roofline(), version=1))
    alone = model.outlook(none, none, none).predict(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    assert alone.tolist() == [[0.0], [0.0], [0.0]]


def test_each_decode_is_bound_by_its_own_side() -> None:
    """Where the FLOPs of long contexts take longer than their bytes, they do not hide what short ones have to read."""
    model, running = LatencyModel(SHAPE, BALANCED), [100, 500, 5000, 40_000]
    for grown in (0, 600):
        requests = model.outlook(np.zeros(0, np.int64), np.zeros(0, np.int64), running)
        after = Following(0, grown)
        times = requests.predict(np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64), 0, after)
        listed = model.terms([1] * 4, np.array(running) + grown, 4, 4)
        assert times[2, 1] == pytest.approx(listed.roofline_s[0], rel=1e-12)
        reading = 15360.0 + 1920.0 * (np.array(running) + grown + 1.0)
        computing = PAIR_BYTES[3] * (np.array(running) + grown + 1.0)
        expected = np.maximum(reading, computing).sum() / BALANCED.bandwidth_at(4)
        assert listed.column("attention_decode_s")[0] == pytest.approx(float(expected), rel=1e-12)
