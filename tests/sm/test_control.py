"""Both controls on a stand-in for the driver: what runs where, with what priority, and what is left behind."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

conflux_native = pytest.importorskip("conflux_native")
if not conflux_native.AVAILABLE:
    pytest.skip(conflux_native.WHY_NOT, allow_module_level=True)

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sglang_ext.sm.build import NoLevelError, green_control, plan_green, plan_smctrl, smctrl_control  # noqa: E402
from sglang_ext.sm.checks import WrongError, check_clusters, check_sms  # noqa: E402
from sglang_ext.sm.control import NoControl  # noqa: E402
from sglang_ext.sm.green import green_levels  # noqa: E402
from sglang_ext.sm.planner import PartitionPlanner  # noqa: E402
from sglang_ext.sm.smctrl import SmctrlControl  # noqa: E402
from tests.native.standin import StandIn  # noqa: E402
from tests.sm.topologies import h200, topology  # noqa: E402

LEVELS = (8, 12, 16, 20, 24, 32, 40, 48)
OFFSET = 0x51C


@dataclasses.dataclass(frozen=True)
class Face:
    """In place of torch.cuda.ExternalStream."""

    handle: int
    device: int


@pytest.fixture(autouse=True)
def faces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "ExternalStream", Face)


def device(stand_in: StandIn) -> Any:
    return conflux_native.Device(conflux_native.Driver(stand_in.path))


def smctrl(on: Any, levels: tuple[int, ...] = LEVELS) -> SmctrlControl:
    return smctrl_control(on, OFFSET, plan_smctrl(h200()), levels)


def sms(on: Any, stream: int) -> set[int]:
    return {sm for sm, blocks in enumerate(on.smid_histogram(stream)) if blocks}


def sms_of(tpcs: tuple[int, ...]) -> set[int]:
    return {sm for tpc in tpcs for sm in (2 * tpc, 2 * tpc + 1)}


def test_masked_streams_keep_to_the_plan(stand_in: StandIn) -> None:
    on = device(stand_in)
    control = smctrl(on)
    for level in control.levels:
        split = PartitionPlanner(h200()).split(level)
        part = control.partition(level)
        assert (part.decode_tpcs, part.prefill_tpcs) == (level, 66 - level)
        assert sms(on, part.decode.handle) == sms_of(split.decode)
        assert sms(on, part.prefill.handle) == sms_of(split.prefill)
        check_sms(on, control, level, 5.0)
        assert check_clusters(on, control, level, 5.0) == (2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(("least", "fits"), [(2, 4), (3, 6), (4, 8)])
def test_sets_without_room_for_clusters_of_eight_are_caught(stand_in: StandIn, least: int, fits: int) -> None:
    on = device(stand_in)
    planner = PartitionPlanner(h200(), least, only=2 * least)
    control = smctrl_control(on, OFFSET, planner, planner.levels)
    (level,) = planner.levels
    if fits == 8:
        check_clusters(on, control, level, 5.0)
    else:
        with pytest.raises(TimeoutError, match=f"clusters of {fits + 1} blocks on the decode stream did not end"):
            check_clusters(on, control, level, 0.3)


def test_levels_have_decode_streams_of_their_own_and_share_the_prefill_stream(stand_in: StandIn) -> None:
    control = smctrl(device(stand_in))
    parts = [control.partition(level) for level in control.levels]
    assert len({part.decode for part in parts}) == len(LEVELS)
    assert len({part.prefill for part in parts}) == 1
    assert control.partition(8) is control.partition(8)


def test_the_prefill_stream_changes_its_mask_for_what_comes_after(stand_in: StandIn) -> None:
    on = device(stand_in)
    control = smctrl(on)
    prefill = control.partition(8).prefill.handle
    control.prefill_on(48)
    assert len(sms(on, prefill)) == 2 * 18
    assert len(sms(on, control.partition(8).decode.handle)) == 2 * 8


@pytest.mark.parametrize("kind", ["smctrl", "green"])
def test_reserved_decode_runs_everywhere_and_prefill_is_kept_off(stand_in: StandIn, kind: str) -> None:
    on = device(stand_in)
    control = smctrl(on) if kind == "smctrl" else green_control(on, LEVELS)
    part = control.reserve(16)
    assert (part.decode_tpcs, part.prefill_tpcs) == (66, 50)
    assert sms(on, part.decode.handle) == set(range(132))
    assert len(sms(on, part.prefill.handle)) == 100
    assert control.reserve(16) == part
    control.close()


@pytest.mark.parametrize("kind", ["smctrl", "green"])
def test_decode_has_the_greatest_priority_and_prefill_the_least(stand_in: StandIn, kind: str) -> None:
    on = device(stand_in)
    least, greatest = on.stream_priorities()
    assert greatest < least
    control = smctrl(on) if kind == "smctrl" else green_control(on, LEVELS)
    for part in (control.partition(24), control.reserve(24)):
        assert stand_in.priority(part.decode.handle) == greatest
        assert stand_in.priority(part.prefill.handle) == least


def test_other_streams_are_left_alone(stand_in: StandIn) -> None:
    on = device(stand_in)
    before = on.create_stream()
    smctrl(on).partition(8)
    assert sms(on, before) == set(range(132)) == sms(on, on.create_stream())


@pytest.mark.parametrize("kind", ["smctrl", "green"])
def test_closing_gives_all_back_and_does_nothing_twice(stand_in: StandIn, kind: str) -> None:
    on = device(stand_in)
    held = {what: stand_in.live(what) for what in ("streams", "green")}
    control = smctrl(on) if kind == "smctrl" else green_control(on, LEVELS)
    control.partition(8)
    control.reserve(8)
    assert stand_in.live("streams") > held["streams"]
    control.close()
    control.close()
    assert {what: stand_in.live(what) for what in held} == held
    for ask in (control.partition, control.reserve, control.handles):
        with pytest.raises(ValueError, match="levels on offer are"):
            ask(8)


def test_no_mask_outlives_its_stream(stand_in: StandIn) -> None:
    control = smctrl(device(stand_in))
    slot, masked = conflux_native.MaskSlot(OFFSET), []
    for level in LEVELS:
        handles = control.handles(level)
        masked += [handles.decode, handles.prefill]
    assert all(slot.read(stream) is not None for stream in masked)
    control.close()
    # The stand-in keeps the memory of destroyed streams.
    assert all(slot.read(stream) is None for stream in masked)


def test_a_stream_that_cannot_be_made_leaves_none_behind(stand_in: StandIn) -> None:
    on = device(stand_in)
    held = stand_in.live("streams")
    stand_in.set(FAIL="cuStreamCreateWithPriority=2@5")
    with pytest.raises(conflux_native.CudaError, match="OUT_OF_MEMORY"):
        smctrl(on)
    assert stand_in.live("streams") == held


def test_green_streams_are_disjoint_and_as_large_as_they_say(stand_in: StandIn) -> None:
    on = device(stand_in)
    control = green_control(on, plan_green(on))
    assert control.levels == LEVELS
    for level in control.levels:
        part = control.partition(level)
        decode, prefill = sms(on, part.decode.handle), sms(on, part.prefill.handle)
        assert len(decode) == 2 * part.decode_tpcs == 2 * level
        assert len(prefill) == 2 * part.prefill_tpcs
        assert decode.isdisjoint(prefill)
        check_sms(on, control, level, 5.0)


def test_green_where_the_driver_has_the_structured_split(newest: StandIn) -> None:
    on = device(newest)
    control = green_control(on, plan_green(on))
    for level in control.levels:
        check_sms(on, control, level, 5.0)


def test_a_driver_without_green_contexts_is_named(old: StandIn) -> None:
    with pytest.raises(NoLevelError, match=r"no green contexts: they came with CUDA 12\.4"):
        plan_green(device(old))


def test_a_green_context_that_cannot_be_made_leaves_nothing_behind(stand_in: StandIn) -> None:
    on = device(stand_in)
    held = {kind: stand_in.live(kind) for kind in ("streams", "green")}
    stand_in.set(FAIL="cuGreenCtxCreate=2@5")
    with pytest.raises(conflux_native.CudaError, match="OUT_OF_MEMORY"):
        green_control(on, LEVELS)
    assert {kind: stand_in.live(kind) for kind in held} == held


@given(st.integers(2, 300), st.sampled_from([(2, 2), (4, 2), (8, 8), (16, 8)]), st.none() | st.integers(1, 150))
def test_green_levels_fit_the_granularity(sm_count: int, granularity: tuple[int, int], only: int | None) -> None:
    least, multiple = granularity
    levels = green_levels(sm_count, granularity, only=only)
    assert list(levels) == sorted(set(levels))
    assert len(levels) <= (12 if only is None else 1)
    for level in levels:
        assert 2 * level >= least
        assert 2 * level % multiple == 0
        assert sm_count - 2 * level >= least
    assert levels or only is not None or sm_count < 4 * max(least, 8)


def test_counts_that_are_no_level_are_refused_by_name(stand_in: StandIn) -> None:
    on = device(stand_in)
    control = smctrl(on, levels=(8, 16))
    for ask in (control.partition, control.reserve, control.handles):
        with pytest.raises(ValueError, match="decode cannot be given 13 TPCs here"):
            ask(13)
        with pytest.raises(ValueError, match="24 TPCs did not pass the self-test"):
            ask(24)
        with pytest.raises(ValueError, match="levels on offer are"):
            green_control(on, (8, 16)).partition(24)


def test_no_control_says_so() -> None:
    control = NoControl()
    assert (control.kind, control.levels) == ("none", ())
    for ask in (control.partition, control.reserve, control.handles):
        with pytest.raises(ValueError, match="no SM control here"):
            ask(8)
    control.close()


def test_an_undividable_gpu_is_named() -> None:
    with pytest.raises(NoLevelError, match="the 2 TPCs of this GPU cannot be divided"):
        plan_smctrl(topology([2]))


def test_a_mask_that_does_nothing_is_caught(stand_in: StandIn) -> None:
    stand_in.set(OFFSET=-1)
    on = device(stand_in)
    with pytest.raises(WrongError, match="decode on 8 TPCs: kernels ran on SMs outside of the plan"):
        check_sms(on, smctrl(on), 8, 5.0)


class Askew:
    """A control whose streams' kernels run on given SMs; also the device that says so."""

    sm_count = 132
    compute_capability = (9, 0)

    def __init__(self, decode: set[int], prefill: set[int]) -> None:
        self.ran = {1: decode, 2: prefill}

    def handles(self, tpcs: int) -> Any:
        from sglang_ext.sm.control import Handles

        return Handles(1, 2, tpcs, 66 - tpcs)

    def smid_histogram(self, stream: int, timeout_s: float, blocks_per_sm: int) -> list[int]:
        # Each probe of few blocks overlooks some.
        seen = [sm for sm in self.ran[stream] if blocks_per_sm >= 16 or random.Random(sm).random() < 0.5]
        return [int(sm in seen) for sm in range(self.sm_count)]


def test_a_few_blocks_may_pass_an_sm_over() -> None:
    askew = Askew(set(range(16)), set(range(16, 132)))
    check_sms(askew, askew, 8, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decode", "prefill", "why"),
    [
        (range(14), range(16, 132), "decode was given 8 TPCs .16 SMs., but its kernels ran on 14 SMs"),
        (range(16), range(132), "prefill was given 58 TPCs"),
        (range(16), range(15, 131), "share the SMs 15"),
    ],
)
def test_sides_that_overlap_or_have_another_size_are_caught(decode: range, prefill: range, why: str) -> None:
    askew = Askew(set(decode), set(prefill))
    with pytest.raises(WrongError, match=why):
        check_sms(askew, askew, 8, 1.0)  # type: ignore[arg-type]
