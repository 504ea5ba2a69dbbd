"""The search against a stand-in driver: real child processes, which wrong offsets crash, hang and mislead."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("conflux_native._core", reason="the extension is not built")

from conflux_native import search, trials
from conflux_native.child import NO_EFFECT, OTHER_SMS, TIMEOUT, VERIFIED
from conflux_native.remembered import path_of, recall
from conflux_native.search import NotFound, find_slot
from conflux_native.trials import Attempt

from .searching import World, make_world, outcomes  # noqa: F401
from .standin import StandIn

FAR = 0x7FC


def test_a_known_offset_takes_one_child_and_is_then_remembered(world: World) -> None:
    found = world.find()
    assert (found.offset, found.how) == (0x51C, "known")
    assert found.tried == (Attempt(0x51C, VERIFIED, "00" * 20),)
    assert len(world.pids) == 1

    again = world.find()
    assert (again.offset, again.how, again.tried) == (0x51C, "remembered", ())
    assert len(world.pids) == 1
    assert world.find(use_memory=False).how == "known"


@pytest.mark.parametrize(
    "setting", [{"VERSION": 12080, "OFFSET": 0x4FC}, {"NAME": "NVIDIA H100"}], ids=["driver", "gpu"]
)
def test_another_driver_or_gpu_is_not_remembered(world: World, setting: dict[str, object]) -> None:
    world.find()
    world.set(**setting)
    assert world.find().how == "known"


def test_what_was_remembered_is_not_believed_if_it_makes_no_sense(world: World) -> None:
    world.find()
    (file,) = world.memory.glob("stream-mask-*.json")
    text = file.read_text()
    for nonsense in ("0", "6", "4096", "true"):
        file.write_text(text.replace("1308", nonsense))
        assert world.find().how == "known"
    file.write_text("damaged")
    assert world.find().how == "known"
    assert world.find().how == "remembered"


def test_forced_searches_do_not_believe_the_memory_but_add_to_it(world: World) -> None:
    assert world.find(offsets=[0x500, 0x51C]).how == "searched"
    assert world.find().how == "remembered"
    assert world.find(offsets=[0x51C]).how == "searched"


def test_a_known_offset_that_is_wrong_here_leads_to_a_search(world: World) -> None:
    world.set(OFFSET=FAR)
    found = world.find()
    assert (found.offset, found.how) == (FAR, "searched")
    assert found.tried[0] == Attempt(0x51C, NO_EFFECT, found.tried[0].before)
    assert outcomes(found.tried)[FAR] == VERIFIED


def test_an_unknown_driver_is_searched(world: World) -> None:
    world.set(VERSION=12090, OFFSET=0x50C)
    found = world.find()
    assert (found.offset, found.how) == (0x50C, "searched")


def test_a_search_without_knowledge_survives_offsets_that_crash_hang_and_break(world: World) -> None:
    world.set(CRASH="0x10c-0x10f,0x200", HANG="0x300", ERROR="0x400", POINTERS="crash")
    found = world.find(skip_known=True, probe_timeout_s=1.0)
    assert (found.offset, found.how) == (0x51C, "searched")
    met = set(outcomes(found.tried).values())
    assert {NO_EFFECT, OTHER_SMS, "killed by SIGABRT", TIMEOUT, "error: CUDA_ERROR_ILLEGAL_ADDRESS", VERIFIED} <= met


def test_wrong_offsets_are_tried_in_the_order_given_and_survived(world: World) -> None:
    world.set(CRASH="0x600", HANG="0x700", ERROR="0x740")
    found = world.find(offsets=[0x600, 0x700, 0x740, 0x518, 0x51C, 0x520], probe_timeout_s=1.0)
    assert [attempt.offset for attempt in found.tried] == [0x600, 0x700, 0x740, 0x518, 0x51C]
    assert list(outcomes(found.tried).values()) == [
        "killed by SIGABRT",
        TIMEOUT,
        "error: CUDA_ERROR_ILLEGAL_ADDRESS",
        OTHER_SMS,
        VERIFIED,
    ]
    # A child each for the first three, one for the next two, one to verify.
    assert len(world.pids) == 5


def test_a_place_that_masks_every_stream_is_refuted(world: World) -> None:
    world.set(SHARED_OFFSET=0x600, OFFSET=FAR)
    found = world.find(offsets=[0x600, FAR], probe_timeout_s=1.0)
    assert found.offset == FAR
    assert outcomes(found.tried)[0x600].startswith("not verified: a stream beside")


def test_where_there_is_no_mask_the_reason_says_what_was_tried(world: World) -> None:
    world.set(OFFSET=-1, CRASH="0x600", NAME="NVIDIA Z9")
    with pytest.raises(NotFound) as caught:
        world.find(offsets=[0x500, 0x504, 0x600])
    reason = caught.value.reason
    assert reason.startswith("no stream mask found on NVIDIA Z9, driver libcuda.so.1 (CUDA 13.0)")
    assert reason.endswith("tried 3 offsets (2 × no effect; 1 × killed by SIGABRT)")
    assert outcomes(caught.value.tried) == {0x500: NO_EFFECT, 0x504: NO_EFFECT, 0x600: "killed by SIGABRT"}
    assert not list(world.memory.glob("*.json"))


def test_the_whole_range_is_tried_before_giving_up(world: World) -> None:
    world.set(OFFSET=-1)
    with pytest.raises(NotFound, match="tried 1023 offsets") as caught:
        world.find()
    assert set(outcomes(caught.value.tried)) == set(range(4, 4096, 4))
    assert len(world.pids) == 2


def test_another_gpu_than_the_parents_is_refused(world: World) -> None:
    run = trials.Trials(world.library.path, 0, "GPU-another", 1e9, 2.0)
    assert not run.verified(0x51C)
    assert "set CUDA_VISIBLE_DEVICES before a process first uses CUDA" in run.stopped


def test_a_driver_without_uuids_is_searched_too(
    stand_in_old: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_VERSION", "12000")
    monkeypatch.setenv("STAND_IN_OFFSET", "0x4cc")
    assert find_slot(driver_path=stand_in_old.path, remembered_dir=tmp_path).how == "known"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"VERSION": 11080}, "the driver is for CUDA 11.8; stream masks need one for 12.0 or newer"),
        ({"TPCS": 1}, "has 2 SMs"),
        ({"TPCS": 129}, "has 258 SMs"),
        ({"DEVICES": 0}, "GPU 0 cannot be used"),
        ({"FAIL": "cuInit=100"}, "GPU 0 cannot be used: .*CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_machines_without_masks_are_told_so_at_once(world: World, settings: dict[str, object], reason: str) -> None:
    world.set(**settings)
    with pytest.raises(NotFound, match=reason):
        world.find()
    assert not world.pids


def test_without_a_driver_nothing_is_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="cannot be used"):
        find_slot(driver_path=str(tmp_path / "libcuda.so.1"), remembered_dir=tmp_path)


def test_beside_others_on_one_gpu_only_the_known_offset_is_tried(world: World, tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    world.patch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert world.find().how == "known"
    world.set(OFFSET=FAR, NAME="another")
    with pytest.raises(NotFound, match="stop MPS once") as caught:
        world.find()
    assert outcomes(caught.value.tried) == {0x51C: NO_EFFECT}


def test_nothing_is_written_in_the_calling_process(world: World) -> None:
    world.find()
    assert world.library.calls("cuStreamCreateWithPriority") == 0
    assert world.library.calls("cuLaunchKernel") == 0


def test_the_memory_says_what_it_is_of(world: World) -> None:
    from conflux_native import Device, Driver

    world.find()
    driver = Driver(world.library.path)
    key = search.key_of(driver, Device(driver))
    assert recall(world.memory, search.KIND, key) == {"offset": 0x51C, "how": "known"}
    assert path_of(world.memory, search.KIND, key).stat().st_mode & 0o777 == 0o600
    assert key["driver_file"] == "libcuda.so.1"
    assert key["gpu"] == "NVIDIA Stand-in"


def test_a_gpu_on_which_nothing_runs_is_left_alone(world: World) -> None:
    world.set(HANG_KERNELS="conflux_smid")
    with pytest.raises(NotFound, match="could not start: TimeoutError: smid_histogram"):
        world.find(probe_timeout_s=0.2)
