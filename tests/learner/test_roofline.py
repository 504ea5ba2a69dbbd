from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import DeviceProfile, LatencyModel, ModelShape
from learner.columns import COLUMN, COLUMNS, ROOFLINE_COLUMNS
from learner.roofline import ALL_REDUCE_LAUNCH_S, Roofline
from tests.learner.worlds import H200, LARGE

# The last one computes so slowly, and reads so quickly, that even a decode's attention is bound by its FLOPs.
DEVICES = {
    "h200": H200,
    "cpu": DeviceProfile(name="cpu", tpcs=1, flops=((1.0, 1e11),), bandwidth=((1.0, 5e10),), link_bandwidth=1e9),
    "slow": DeviceProfile(
        name="slow", tpcs=4, flops=((1.0, 1e11), (4.0, 2e11)), bandwidth=((1.0, 5e11), (4.0, 5e13)), link_bandwidth=1e9
    ),
}
SHAPE = ModelShape(
    name="odd",
    layers=3,
    hidden=576,
    heads=16,
    kv_heads=4,
    head_dim=80,
    intermediate=1536,
    vocabulary=49153,
    weight_bytes=0.5,
    activation_bytes=2.0,
    kv_bytes=1.0,
)

Request = tuple[int, int]
requests = st.one_of(
    st.just((0, 0)),
    st.tuples(st.just(0), st.integers(0, 50)),  # padding, whatever its context says
    st.tuples(st.just(1), st.integers(1, 50_000)),
    st.tuples(st.integers(1, 9000), st.integers(0, 50_000)),
)


def linear_s(n: int, inputs: int, outputs: int, shape: ModelShape, flops: float, bandwidth: float) -> float:
    moved = n * inputs * shape.activation_bytes + inputs * outputs * shape.weight_bytes
    return max(2 * n * inputs * outputs / flops, (moved + n * outputs * shape.activation_bytes) / bandwidth)


def attention_s(pairs: float, q: int, context: int, shape: ModelShape, flops: float, bandwidth: float) -> float:
    heads, kv_heads = shape.heads // shape.tp, max(1, shape.kv_heads // shape.tp)
    moved = 2 * heads * q * shape.head_dim * shape.activation_bytes
    moved += 2 * kv_heads * context * shape.head_dim * shape.kv_bytes
    return max((4 * heads * pairs * shape.head_dim + 2 * heads * pairs) / flops, moved / bandwidth)


def reference(
    shape: ModelShape, device: DeviceProfile, batch: list[Request], logits: int, tpcs: int
) -> dict[str, float]:
    """The formulas, one request and one layer at a time."""
    batch = [(q, c) for q, c in batch if q]
    out = dict.fromkeys((*ROOFLINE_COLUMNS, "attention_causal_s", "attention_padded_s", "compute_s", "memory_s"), 0.0)
    out |= {"prefill_rows": 0.0, "decode_rows": 0.0, "prefill_tokens": 0.0}
    if not batch:
        return out
    flops, bandwidth = float(device.flops_at(tpcs)), float(device.bandwidth_at(tpcs))
    n, tp, bytes_ = sum(q for q, _ in batch), shape.tp, shape.activation_bytes
    q_width = shape.heads // tp * shape.head_dim
    kv_width = max(1, shape.kv_heads // tp) * shape.head_dim
    inner = shape.intermediate // tp
    operators = {
        "qkv_s": (n, shape.hidden, q_width + 2 * kv_width),
        "output_s": (n, q_width, shape.hidden),
        "gate_up_s": (n, shape.hidden, 2 * inner),
        "down_s": (n, inner, shape.hidden),
    }
    for _ in range(shape.layers):
        for name, (rows, inputs, outputs) in operators.items():
            out[name] += linear_s(rows, inputs, outputs, shape, flops, bandwidth)
        out["elementwise_s"] += 2 * (2 * n * shape.hidden * bytes_) / bandwidth
        out["elementwise_s"] += (3 * n * inner + 2 * n * (q_width + kv_width)) * bytes_ / bandwidth
        for q, c in batch:
            decode = q == 1 and c > 0
            full = attention_s(q * (q + c), q, q + c, shape, flops, bandwidth)
            out["attention_decode_s" if decode else "attention_prefill_s"] += full
            if not decode:
                masked = sum(c + i + 1 for i in range(q)) if q < 100 else q * c + q * (q + 1) / 2
                out["attention_causal_s"] += attention_s(masked, q, q + c, shape, flops, bandwidth)
        if tp > 1:
            volume = n * shape.hidden * bytes_
            once = 2 * (tp - 1) * ALL_REDUCE_LAUNCH_S + 2 * (tp - 1) * volume / (tp * device.link_bandwidth)
            out["all_reduce_s"] += 2 * (once + tp * (tp - 1) * volume / flops)
    out["elementwise_s"] += 2 * n * shape.hidden * bytes_ / bandwidth
    if logits:
        columns = -(-shape.vocabulary // tp)
        out["classifier_s"] = linear_s(logits, shape.hidden, columns, shape, flops, bandwidth)
    decodes = [(q, c) for q, c in batch if q == 1 and c > 0]
    out["decode_rows"], out["prefill_rows"] = len(decodes), len(batch) - len(decodes)
    out["prefill_tokens"] = n - len(decodes)
    if len(decodes) < len(batch):
        pair_flops = shape.layers * shape.heads // tp * (4 * shape.head_dim + 2)
        out["attention_padded_s"] = sum((q + c) ** 2 for q, c in batch) * pair_flops / flops
    return out


@settings(max_examples=60)
@given(data=st.data(), device=st.sampled_from(sorted(DEVICES)), tp=st.sampled_from([1, 2, 16]))
def test_columns_follow_the_formulas(data: st.DataObject, device: str, tp: int) -> None:
    shape, profile = msgspec.structs.replace(SHAPE, tp=tp), DEVICES[device]
    n = data.draw(st.integers(1, 8))
    batches = data.draw(st.lists(st.lists(requests, min_size=n, max_size=n), min_size=1, max_size=4))
    tpcs = data.draw(st.lists(st.integers(1, profile.tpcs), min_size=len(batches), max_size=len(batches)))
    logits = [data.draw(st.integers(0, sum(q > 0 for q, _ in batch))) for batch in batches]
    q, c = np.array(batches)[..., 0], np.array(batches)[..., 1]
    terms = LatencyModel(shape, profile).terms(q, c, logits, tpcs)
    for row, batch in enumerate(batches):
        expected = reference(shape, profile, batch, logits[row], tpcs[row])
        for name in set(expected) - {"compute_s", "memory_s"}:
            np.testing.assert_allclose(terms.column(name)[row], expected[name], rtol=1e-9, atol=0.0, err_msg=name)
        total = sum(expected[name] for name in ROOFLINE_COLUMNS)
        np.testing.assert_allclose(terms.roofline_s[row], total, rtol=1e-9, atol=0.0)
        # The maximum of sums is at most the sum of maxima.
        bound = max(terms.column("compute_s")[row], terms.column("memory_s")[row])
        assert bound <= (terms.roofline_s[row] - terms.column("all_reduce_s")[row]) * (1 + 1e-9)


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_whole_device_columns_do_not_depend_on_s(device: str) -> None:
    profile = DEVICES[device]
    terms = LatencyModel(SHAPE, profile).terms([100, 1, 1], [0, 20, 3000], 3, np.arange(1, profile.tpcs + 1))
    for name, alone in (("compute_whole_s", "compute_s"), ("memory_whole_s", "memory_s")):
        np.testing.assert_allclose(terms.column(name), terms.column(alone)[-1])
    shortfall = profile.tpcs / np.arange(1, profile.tpcs + 1) - 1.0
    for name in ("compute", "memory"):
        np.testing.assert_allclose(terms.column(f"{name}_partition_s"), terms.column(f"{name}_whole_s") * shortfall)
    read = SHAPE.layers * 2 * SHAPE.kv_heads * SHAPE.head_dim * SHAPE.kv_bytes * (21 + 3001)
    expected = read / profile.bandwidth_at(profile.tpcs) * shortfall
    np.testing.assert_allclose(terms.column("attention_decode_partition_s"), expected)
    assert ((terms.column("bandwidth_demand") > 0.0) & (terms.column("bandwidth_demand") <= 1.0)).all()


def test_an_empty_forward_costs_nothing() -> None:
    terms = LatencyModel(SHAPE, H200).terms([[0, 0], [0, 0]], [[0, 7], [0, 0]], 0, [3, 66])
    assert not terms.roofline_s.any()
    nothing = [name for name in COLUMNS if name.endswith(("_s", "_rows", "forward", "tokens", "context"))]
    for name in nothing:
        assert not terms.column(name).any(), name


def test_no_candidates_and_no_requests() -> None:
    model = LatencyModel(SHAPE, H200)
    assert len(model.terms(np.zeros((0, 3)), np.zeros((0, 3)), 0, 1)) == 0
    assert not model.terms(np.zeros((2, 0)), np.zeros((2, 0)), 0, 1).roofline_s.any()


def test_shapes_broadcast() -> None:
    model = LatencyModel(SHAPE, H200)
    q, c = np.array([300, 1, 0]), np.array([0, 70, 9])
    many = model.terms(np.tile(q, (4, 1)), np.tile(c, (4, 1)), [2] * 4, [2, 5, 9, 66])
    np.testing.assert_allclose(model.terms(q, c, 2, [2, 5, 9, 66]).matrix, many.matrix)
    np.testing.assert_allclose(model.terms(q[None], np.tile(c, (4, 1)), 2, [2, 5, 9, 66]).matrix, many.matrix)
    assert model.terms(q, c, 2, 66).tpcs.tolist() == [66.0]
    assert model.terms(np.tile(q, (4, 1)), c, 2, 66).tpcs.tolist() == [66.0] * 4


def test_the_order_of_requests_does_not_matter() -> None:
    model = LatencyModel(SHAPE, H200)
    random = np.random.default_rng(0)
    q, c = random.choice([0, 1, 1, 700], 40), random.integers(0, 4000, 40)
    order = random.permutation(40)
    np.testing.assert_allclose(model.terms(q, c, 5, 9).matrix, model.terms(q[order], c[order], 5, 9).matrix)


def test_known_magnitudes() -> None:
    """Measured on an H200: 200–228 ms for 8,192 tokens, 7.9 ms for 32 decodes at 2k."""
    model = LatencyModel(LARGE, H200)
    assert 0.2 < model.terms([8192], [0], 1, 66).roofline_s[0] < 0.26
    assert 0.005 < model.terms([1] * 32, [2048] * 32, 32, 66).roofline_s[0] < 0.0079


def test_a_split_model_needs_a_link() -> None:
    lonely = msgspec.structs.replace(H200, link_bandwidth=0.0)
    with pytest.raises(ValueError, match="needs a link bandwidth"):
        Roofline(msgspec.structs.replace(SHAPE, tp=2), lonely)
    Roofline(SHAPE, lonely)


@pytest.mark.parametrize(
    ("q", "c", "tpcs", "padded"),
    [
        ([90], [0], 66, 128.0),
        ([127, 1], [0, 50], 66, 128.0),
        ([128, 1], [0, 50], 66, 512.0),
        ([300, 300], [0, 9], 66, 600.0),  # larger than any graph
        ([90], [0], 48, 90.0),  # in a window, whose prefills are not graphs
        ([1, 1], [50, 50], 66, 2.0),  # decodes
        ([0], [0], 66, 0.0),
    ],
)
def test_linear_layers_work_on_the_padding_of_graphs_too(q, c, tpcs, padded) -> None:
    graphs = Roofline(msgspec.structs.replace(SHAPE, graph_tokens=(128, 512)), DEVICES["h200"])
    plain = Roofline(SHAPE, DEVICES["h200"])
    assert DEVICES["h200"].tpcs == 66
    found, _, roofline_s = graphs.columns(q, c, 1, tpcs)
    expected, _, bare_s = plain.columns(q, c, 1, tpcs)
    assert found[COLUMN["padded_tokens"], 0] == padded
    per_token = plain.columns([1000], [0], 1, tpcs)[0][COLUMN["linear_compute_s"], 0] / 1000
    assert found[COLUMN["linear_compute_s"], 0] == pytest.approx(per_token * padded)
    same = [COLUMN[name] for name in ("attention_prefill_s", "attention_decode_s", "prefill_tokens", "decode_rows")]
    np.testing.assert_array_equal(found[same], expected[same])
    assert (roofline_s > bare_s) == (padded > sum(q))
