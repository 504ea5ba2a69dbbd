"""Verdicts from what the probe said before it ended."""

from __future__ import annotations

from typing import Any

from sglang_ext.doctor.probed import Probed, ways_of
from sglang_ext.guarded import Ended

DRIVER = {"step": "driver", "library": "/lib/libcuda.so.1", "cuda_version": 13000, "gpus": 1}
GPU = {"step": "gpu", "ordinal": 0, "name": "GPU", "sms": 132}
PASSED = {"step": "way", "kind": "smctrl", "passed": True, "levels": [8, 16], "reason": "tested"}
REFUSED = {"step": "way", "kind": "green", "passed": False, "levels": [], "reason": "a level hung"}


def probed(*lines: dict[str, Any], ended: Ended | None = None) -> Probed:
    found = Probed(ended=ended or Ended("done"))
    for line in lines:
        found.take(line)
    return found


def verdicts(*lines: dict[str, Any], ended: Ended | None = None, problem: str | None = None) -> list[tuple[str, str]]:
    return [(way.verdict, way.reason) for way in ways_of(probed(*lines, ended=ended), problem, "known at 0x51c")]


def test_each_way_has_its_own_verdict() -> None:
    smctrl, green = ways_of(probed(DRIVER, GPU, PASSED, REFUSED), None, "")
    assert (smctrl.kind, smctrl.verdict, smctrl.reason, smctrl.levels) == ("smctrl", "passed", "tested", (8, 16))
    assert (green.kind, green.verdict, green.reason, green.levels) == ("green", "failed", "a level hung", ())


def test_without_a_test_what_is_known_is_said() -> None:
    assert verdicts(DRIVER) == [("not tested", "known at 0x51c"), ("not tested", "nothing was run on the GPU")]


def test_what_is_in_the_way_of_both() -> None:
    assert verdicts({"step": "driver", "error": "no libcuda"}) == [("unavailable", "no libcuda")] * 2
    assert verdicts({**DRIVER, "gpus": 0}) == [("unavailable", "the driver sees no GPU")] * 2
    assert verdicts(DRIVER, problem="a GPU is hidden") == [("unavailable", "a GPU is hidden")] * 2
    assert [way.reason for way in ways_of(None, "no extension", "")] == ["no extension"] * 2
    assert verdicts(DRIVER, {"step": "gpu", "error": "out of memory"}) == [("failed", "out of memory")] * 2


def test_a_probe_that_died_says_where() -> None:
    crashed = Ended("crashed", "ended by SIGSEGV")
    assert verdicts(ended=crashed) == [("unavailable", "the probe crashed after its start: ended by SIGSEGV")] * 2
    hung = Ended("silent", "nothing was heard of it for 60 s")
    smctrl, green = verdicts(DRIVER, GPU, PASSED, ended=hung)
    assert smctrl == ("passed", "tested")
    assert green == ("failed", "the probe hung after gpu: nothing was heard of it for 60 s")


def test_errors_of_steps() -> None:
    found = probed(DRIVER, {"step": "green", "error": "too old"}, ended=Ended("crashed", "exit status 1"))
    assert found.error("driver") is None
    assert found.error("green") == "too old"
    assert found.error("gpcs") == "the probe crashed after green: exit status 1"
    assert probed(DRIVER).error("gpcs") is None
