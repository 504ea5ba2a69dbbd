"""On a real GPU: the ways of SM control pass their tests, and every level runs what a server runs.

Each level runs in a process of its own with a time limit: one that is not safe hangs for good.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

conflux_native = pytest.importorskip("conflux_native")
torch = pytest.importorskip("torch")

from sglang_ext.sm.planner import PartitionPlanner  # noqa: E402
from sglang_ext.sm.select import Chosen, choose  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not conflux_native.AVAILABLE, reason=conflux_native.WHY_NOT or "extension"),
]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def masked(state: str) -> Chosen:
    chosen = choose("auto", 0, state, gemm="require")
    assert chosen.control.kind == "smctrl", chosen.reasons
    return chosen


@pytest.fixture(scope="module")
def green(state: str) -> Chosen:
    chosen = choose("green", 0, state, gemm="require")
    assert chosen.control.kind == "green", chosen.reasons
    return chosen


@pytest.fixture(scope="module")
def masked_device() -> tuple[Any, Any]:
    """A device and a verified slot."""
    from conflux_native.search import find_slot

    device = conflux_native.Device(conflux_native.Driver(), 0)
    return device, conflux_native.MaskSlot(find_slot(0, use_memory=False).offset)


def test_auto_takes_stream_masks_with_every_planned_level(masked: Chosen) -> None:
    report = masked.reports["smctrl"]
    assert report.gemm == "checked"
    assert report.lost == {}
    assert masked.control.levels == report.levels == masked.control.planner.levels
    print(masked.reasons["smctrl"], f"chosen in {masked.seconds:.1f} s")


def test_forced_green_takes_green_contexts_at_their_granularity(green: Chosen) -> None:
    least, multiple = conflux_native.green_granularity(conflux_native.Device(conflux_native.Driver(), 0))
    report = green.reports["green"]
    assert report.gemm == "checked"
    assert report.lost == {}
    for level in green.control.levels:
        assert 2 * level >= least
        assert 2 * level % multiple == 0
    print(green.reasons["green"], f"chosen in {green.seconds:.1f} s")


def test_a_later_start_is_quick(masked: Chosen, state: str) -> None:
    again = choose("auto", 0, state, gemm="require")
    assert again.control.levels == masked.control.levels
    assert "(remembered" in again.reasons["smctrl"]
    again.control.close()
    print(f"chosen again in {again.seconds:.2f} s")


@pytest.mark.parametrize("kind", ["smctrl", "green"])
def test_every_level_runs_gemms_attention_and_decode_graphs(kind: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("sgl_kernel", reason="FlashAttention 3 comes with SGLang's kernels")
    from bench.sm_levels import in_a_process

    chosen: Chosen = request.getfixturevalue("masked" if kind == "smctrl" else "green")
    outcomes = {level: in_a_process(kind, level) for level in chosen.control.levels}
    assert {level: outcome["why"] for level, outcome in outcomes.items() if not outcome["passed"]} == {}


def test_a_thousand_random_planned_splits_are_where_they_should_be(
    masked: Chosen, masked_device: tuple[Any, Any]
) -> None:
    """Splits of any plannable size, with each GPC's TPCs dealt out at random, on two streams at once."""
    from conflux_native.topology import sms_of
    from conflux_native.verify import observed

    device, slot = masked_device
    planner: PartitionPlanner = masked.control.planner
    one, other = device.create_stream(), device.create_stream()
    chance = random.Random(0)
    sizes = [tpcs for tpcs in range(planner.topology.tpcs) if planner.plan(tpcs) is not None]
    for _ in range(1000):
        split = planner.plan(chance.choice(sizes))
        assert split is not None
        renamed = {}
        for gpc in (*planner.gpcs, *planner.loose):
            renamed.update(zip(gpc, chance.sample(gpc, len(gpc)), strict=True))
        for stream, side in ((one, split.decode), (other, split.prefill)):
            tpcs = [renamed[tpc] for tpc in side]
            slot.apply(stream, conflux_native.Mask(tpcs))
            planned = sms_of(tpcs)
            assert observed(device, stream, planned, 5.0) == planned
    for stream in (one, other):
        slot.clear(stream)
        device.destroy_stream(stream)


def test_a_mask_change_costs_under_100_ns(masked_device: tuple[Any, Any]) -> None:
    device, slot = masked_device
    stream = device.create_stream()
    cost_ns = min(slot.cost_ns(stream, conflux_native.Mask([0]), conflux_native.Mask([1]), 100_000) for _ in range(5))
    print(f"{cost_ns:.1f} ns")
    assert cost_ns < 100
    slot.clear(stream)
    device.destroy_stream(stream)


def test_compute_kernels_on_disjoint_masks_do_not_slow_each_other(masked: Chosen) -> None:
    """Within 2 %, as the best of some trials."""
    device = conflux_native.Device(conflux_native.Driver(), 0)
    for level in masked.control.levels:
        handles = masked.control.handles(level)

        def decode(stream: int = handles.decode, blocks: int = 8 * handles.decode_tpcs) -> None:
            device.launch_spin(stream, 2_000_000, blocks)

        def beside(stream: int = handles.prefill, blocks: int = 32 * handles.prefill_tpcs) -> None:
            device.launch_spin(stream, 2_000_000, blocks)

        device.elapsed_ms(handles.decode, decode, 10.0)
        alone_ms = min(device.elapsed_ms(handles.decode, decode, 10.0) for _ in range(3))
        together_ms = []
        for _ in range(3):
            beside()
            together_ms.append(device.elapsed_ms(handles.decode, decode, 10.0))
            assert device.synchronize(handles.prefill, 20.0)
        print(f"{level} TPCs: {alone_ms:.2f} ms alone, {min(together_ms):.2f} ms beside prefill's")
        assert min(together_ms) < 1.02 * alone_ms
