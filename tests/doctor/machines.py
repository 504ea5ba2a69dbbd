"""Facts of machines that are not here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_ext.doctor.facts import (
    Conflux,
    Driver,
    Facts,
    Gpcs,
    Gpu,
    Machine,
    Profile,
    Sglang,
    StateDir,
    Torch,
    Way,
)

SMCTRL = Way(kind="smctrl", verdict="passed", reason="decode on 8, 16 of 66 TPCs tested (now, 6.1 s)", levels=(8, 16))
GREEN = Way(kind="green", verdict="passed", reason="decode on 8, 16 of 66 TPCs tested (now, 7.0 s)", levels=(8, 16))
NO_TEST = Way(kind="smctrl", verdict="not tested", reason="offset 0x51c is known for CUDA 13.0")

H200 = Facts(
    machine=Machine(
        system="Linux 6.8.0, Ubuntu 24.04.3 LTS",
        architecture="x86_64",
        python="3.12.3",
        python_supported=True,
        cores=16,
        memory_bytes=128 << 30,
    ),
    torch=Torch(version="2.11.0+cu130", cuda="13.0", sees_gpus=2, peers=((1, 0),), threads=16),
    sglang=Sglang(version="0.5.17", supported=True, supported_versions=("0.5.17",), plugin=True),
    conflux=Conflux(version="0.1.0", extension=True),
    device="cuda",
    hidden=None,
    driver=Driver(version="580.159.04", cuda="13.0", library="/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"),
    gpus=tuple(
        Gpu(
            ordinal=ordinal,
            name="NVIDIA H200",
            memory_bytes=139 << 30,
            sms=132,
            tpcs=66,
            compute_capability="9.0",
        )
        for ordinal in range(2)
    ),
    tested_gpu=0,
    ways=(SMCTRL, GREEN),
    gpcs=Gpcs(gpcs=((0, 2, 4), (1, 3), (5,)), hosts={"2": 6, "16": 3, "4": 5}),
    profile=Profile(
        device="NVIDIA H200",
        source="calibrated",
        origin="/home/user/.cache/conflux/devices/nvidia-h200-0badcafe.json",
        points=14,
        age_s=3 * 86400.0,
        driver="580.159.04, CUDA 13.0",
        flops=677e12,
        bandwidth=4250e9,
    ),
    state_dir=StateDir(path="/home/user/.cache/conflux", writable=True, learnt_models=2),
)

LAPTOP = replace(
    H200,
    torch=Torch(version="2.13.0+cpu", cuda=None, sees_gpus=0, threads=7),
    device="cpu",
    driver=None,
    gpus=(),
    tested_gpu=None,
    ways=(
        Way(kind="smctrl", verdict="unavailable", reason="there is no GPU to control"),
        Way(kind="green", verdict="unavailable", reason="there is no GPU to control"),
    ),
    gpcs=None,
    profile=Profile(device="CPU Some Model x7 bfloat16", source="none"),
)


def with_part(facts: Facts, part: str, **changes: Any) -> Facts:
    """``facts`` with fields of one of its parts changed."""
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})
