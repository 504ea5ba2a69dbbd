"""The report as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest

from sglang_ext.doctor.advice import judge
from sglang_ext.doctor.facts import Facts, Report, Way
from sglang_ext.doctor.render import WIDTH, _links, as_json, as_text, flops_text

from .machines import H200, LAPTOP, with_part


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_text_of_a_gpu_machine() -> None:
    text = as_text(judge(H200))
    flat = unwrapped(text)
    for part in (
        "Linux 6.8.0, Ubuntu 24.04.3 LTS, x86_64, 16 cores, 128.0 GiB of memory",
        "PyTorch 2.11.0+cu130, for CUDA 13.0",
        "SGLang 0.5.17, supported",
        "conflux 0.1.0, with its extension",
        "driver 580.159.04, CUDA 13.0, /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
        "GPU 0 NVIDIA H200, 139.0 GiB, 132 SMs in 66 TPCs, compute capability 9.0",
        "GPU 1 NVIDIA H200",
        "GPC 0 TPCs 0 2 4",
        "alone TPCs 5",
        "of 2 blocks: 6, of 4 blocks: 5, of 16 blocks: 3",
        "smctrl passed: decode on 8, 16 of 66 TPCs tested",
        "calibrated 3 days ago: NVIDIA H200, 677 TFLOP/s, 4250 GB/s on all TPCs, 14 points",
        "/home/user/.cache/conflux, writable, 2 learnt models",
        "auto weighs temporal, chunked, spatial and reserved by prediction",
        "SM control stream masks, on one GPU with FlashAttention 3",
        "nothing: all is well",
    ):
        assert part in flat


def test_text_of_a_machine_that_cannot_serve() -> None:
    facts = with_part(with_part(H200, "sglang", version="0.6.0", supported=False), "torch", error="it is broken")
    text = as_text(judge(facts))
    assert "SGLang      0.6.0, not supported: 0.5.17 is" in text
    assert "serves      not at all, see below" in text
    assert "  must        SGLang 0.6.0 is not supported" in text
    assert "              -> pip install sglang==0.5.17" in text.splitlines()


@pytest.mark.parametrize("facts", [H200, LAPTOP], ids=["gpu", "cpu"])
def test_lines_are_short_and_say_something(facts: Facts) -> None:
    for line in as_text(judge(facts)).splitlines():
        assert line == line.rstrip()
        assert len(line) <= WIDTH or "-> " in line
        assert "None" not in line


@pytest.mark.parametrize("facts", [H200, LAPTOP], ids=["gpu", "cpu"])
def test_json_has_every_field_by_its_name(facts: Facts) -> None:
    report = judge(facts)
    read = json.loads(as_json(report))
    assert set(read) == {field.name for field in dataclasses.fields(Report)}
    assert set(read["facts"]) == {field.name for field in dataclasses.fields(Facts)}
    assert read["schema"] == 1
    assert read["facts"]["ways"][0]["kind"] == "smctrl"
    assert read["serving"]["possible"] is True
    assert read["advice"] == [dataclasses.asdict(each) for each in report.advice]


def test_names_of_fields_are_a_promise() -> None:
    """Whoever reads the JSON relies on these; a change needs a new schema."""
    read = json.loads(as_json(judge(H200)))
    facts = read["facts"]
    assert list(facts["machine"]) == ["system", "architecture", "python", "python_supported", "cores", "memory_bytes"]
    assert list(facts["torch"]) == ["version", "cuda", "sees_gpus", "peers", "threads", "error"]
    assert list(facts["sglang"]) == ["version", "supported", "supported_versions", "plugin", "plugin_problem"]
    assert list(facts["conflux"]) == ["version", "extension", "extension_problem"]
    assert list(facts["driver"]) == ["version", "cuda", "library", "error"]
    assert list(facts["gpus"][0]) == ["ordinal", "name", "memory_bytes", "sms", "tpcs", "compute_capability"]
    assert list(facts["ways"][0]) == ["kind", "verdict", "reason", "levels"]
    assert list(facts["gpcs"]) == ["gpcs", "hosts"]
    assert list(facts["profile"]) == [
        "device", "source", "origin", "points", "age_s", "driver", "flops", "bandwidth",
    ]  # fmt: skip
    assert list(facts["state_dir"]) == ["path", "writable", "learnt_models", "problem"]
    assert list(read["serving"]) == ["possible", "sm_control", "auto_weighs", "one_after_the_other"]


def test_a_long_reason_is_wrapped_under_its_label() -> None:
    long = Way(kind="smctrl", verdict="failed", reason="many words that say what happened " * 8)
    lines = as_text(judge(replace(H200, ways=(long,)))).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("  smctrl"))
    assert lines[start + 1].startswith(" " * 14)
    assert all(len(line) <= WIDTH for line in lines[start : start + 3])


def test_units_of_compute() -> None:
    assert flops_text(677e12) == "677 TFLOP/s"
    assert flops_text(52.14e9) == "52.14 GFLOP/s"


@pytest.mark.parametrize(
    ("gpus", "peers", "said"),
    [
        (2, ((1, 0),), "every GPU reaches every other's memory"),
        (2, (), "no GPU reaches another's memory: several ranks talk through the host"),
        (3, ((1, 0),), "0 and 1 reach each other's memory"),
    ],
)
def test_links_between_gpus_are_named(gpus, peers, said) -> None:
    assert _links(gpus, peers) == said
