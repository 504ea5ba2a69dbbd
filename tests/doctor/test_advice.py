"""What keeps conflux from serving, and what could be better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_ext.doctor.advice import improvements, judge, obstacles, serving
from sglang_ext.doctor.facts import Driver, Facts, Way

from .machines import GREEN, H200, LAPTOP, NO_TEST, with_part


def problems(facts: Facts) -> str:
    return "\n".join(f"{each.problem} -> {each.remedy}" for each in judge(facts).advice)


def test_a_healthy_machine_needs_nothing() -> None:
    report = judge(H200)
    assert report.advice == ()
    assert report.serving.possible
    assert report.serving.sm_control == "smctrl"


def test_a_machine_without_a_gpu_serves_on_its_cpu() -> None:
    report = judge(LAPTOP)
    assert report.serving.possible
    assert report.serving.sm_control == "none"
    assert [each.stops_serving for each in report.advice] == [False]
    assert "no GPU" in report.advice[0].problem


@pytest.mark.parametrize(
    ("part", "changes", "problem", "remedy"),
    [
        ("machine", {"python": "3.9.2", "python_supported": False}, "Python 3.9.2 is too old", "3.11"),
        ("sglang", {"version": None, "supported": False}, "SGLang is not installed", "pip install sglang==0.5.17"),
        (
            "sglang",
            {"version": "0.6.0", "supported": False},
            "SGLang 0.6.0 is not supported (supported: 0.5.17)",
            "pip install sglang==0.5.17",
        ),
        (
            "sglang",
            {"plugin": False, "plugin_problem": "sglang-conflux is not installed in this environment"},
            "will not know --backend conflux",
            "pip install .  # in a checkout of conflux",
        ),
        (
            "sglang",
            {"plugin": False, "plugin_problem": "SGLANG_PLUGINS=other leaves conflux out"},
            "SGLANG_PLUGINS=other",
            "add conflux to SGLANG_PLUGINS",
        ),
        ("torch", {"version": None, "error": "it is not installed"}, "PyTorch cannot be used", "pip install"),
        (
            "state_dir",
            {"writable": False, "problem": "/home/user is not a directory"},
            "the state directory cannot be written: /home/user is not a directory",
            "--conflux-state-dir",
        ),
        ("torch", {"cuda": None, "version": "2.13.0+cpu"}, "built without CUDA", "SGLANG_USE_CPU_ENGINE=1"),
        ("torch", {"sees_gpus": 0}, "PyTorch sees no GPU", "nvidia-smi"),
    ],
)
def test_what_stops_serving(part: str, changes: dict[str, Any], problem: str, remedy: str) -> None:
    facts = with_part(H200, part, **changes)
    (found,) = obstacles(facts)
    assert problem in found.problem
    assert remedy in found.remedy
    assert found.stops_serving
    assert not serving(facts).possible
    assert judge(facts).advice[0] == found


def test_a_driver_older_than_pytorch_s_cuda() -> None:
    facts = replace(with_part(H200, "torch", sees_gpus=0, cuda="12.10"), driver=Driver(version="535.1", cuda="12.9"))
    (found,) = obstacles(facts)
    assert "built for CUDA 12.10, the driver serves CUDA 12.9" in found.problem


def test_a_missing_sglang_on_a_cpu_names_the_cpu_s_recipe() -> None:
    (found,) = obstacles(with_part(LAPTOP, "sglang", version=None, supported=False))
    assert found.remedy == "python -m sglang_ext.cpu.install"


def test_a_cpu_build_of_pytorch_is_right_on_a_cpu() -> None:
    assert list(obstacles(LAPTOP)) == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"source": "none", "origin": None}, "not known"),
        ({"source": "measured"}, "not parts of it"),
        ({"source": "shipped"}, "another GPU of this model"),
        ({"driver": "570.1.2, CUDA 12.8"}, "measured with driver 570.1.2"),
        ({"age_s": 400 * 86400.0}, "400 days old"),
    ],
)
def test_curves_that_could_be_better(changes: dict[str, Any], part: str) -> None:
    facts = with_part(H200, "profile", **changes)
    (found,) = improvements(facts)
    assert part in found.problem
    assert found.remedy == "conflux calibrate"
    (found,) = improvements(replace(facts, tested_gpu=1))
    assert found.remedy == "conflux calibrate --device 1"


def test_ways_of_control() -> None:
    failed = Way(kind="smctrl", verdict="failed", reason="no stream mask found")
    no_green = Way(kind="green", verdict="failed", reason="the driver is too old")
    facts = replace(H200, ways=(failed, GREEN))
    assert serving(facts).sm_control == "green"
    assert "coarser green contexts are used: no stream mask found" in problems(facts)
    facts = replace(H200, ways=(failed, no_green))
    assert serving(facts).sm_control == "none"
    assert "no way of SM control works here" in problems(facts)
    assert "--conflux-sm-control none" in problems(facts)
    facts = replace(H200, ways=(NO_TEST, no_green))
    assert "SM control was not tested" in problems(facts)


def test_without_the_extension_one_advice_says_so() -> None:
    unavailable = tuple(Way(kind=way.kind, verdict="unavailable", reason="no compiler") for way in H200.ways)
    facts = replace(
        with_part(H200, "conflux", extension=False, extension_problem="no compiler was found"), ways=unavailable
    )
    (found,) = improvements(facts)
    assert "no compiler was found" in found.problem
    assert "g++" in found.remedy


def test_hidden_gpus() -> None:
    facts = replace(LAPTOP, hidden="CUDA_VISIBLE_DEVICES is empty")
    (found,) = improvements(facts)
    assert found.remedy == "unset CUDA_VISIBLE_DEVICES"


def test_windows_run_their_halves_at_once_where_there_is_sm_control() -> None:
    assert serving(H200).one_after_the_other == ()
    assert serving(LAPTOP).one_after_the_other == ("spatial", "reserved", "duet")
    assert serving(H200).auto_weighs == ("temporal", "chunked", "spatial", "reserved")
    assert serving(LAPTOP).auto_weighs == ("temporal", "chunked")
