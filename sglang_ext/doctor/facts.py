"""What the doctor found out. ``conflux doctor --json`` prints a :class:`Report` with exactly these field names.

Fields are added, but none is renamed or removed without a new :data:`SCHEMA`. Sizes are in bytes, times in seconds,
TPCs are counts or logical ids. None: could not be found out, or does not apply; the reason stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCHEMA = 1

Verdict = Literal["passed", "failed", "unavailable", "not tested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """``cores``: those that this process may run on. ``python_supported``: whether conflux runs on this Python."""

    system: str
    architecture: str
    python: str
    python_supported: bool
    cores: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """``cuda``: the CUDA version it was built for, None for a CPU build. ``error``: why it cannot be imported.

    ``sees_gpus``: how many GPUs it can use. ``peers``: pairs of these that reach each other's memory, without which
    ranks of ``--tp`` and ``--conflux-xp`` talk through the host. ``threads``: what it computes with on a CPU.
    """

    version: str | None
    cuda: str | None = None
    sees_gpus: int | None = None
    peers: tuple[tuple[int, int], ...] = ()
    threads: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sglang:
    """``supported``: whether this version is one of ``supported_versions``.

    ``plugin``: whether SGLang will find conflux as a plugin; ``plugin_problem``: why not.
    """

    version: str | None
    supported: bool
    supported_versions: tuple[str, ...]
    plugin: bool
    plugin_problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflux:
    """``extension``: whether the compiled part is there; ``extension_problem``: why not."""

    version: str | None
    extension: bool
    extension_problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """``version``: as 580.159.04. ``cuda``: the newest CUDA it serves, as 13.0. ``library``: path of libcuda."""

    version: str | None
    cuda: str | None = None
    library: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """``tpcs``: two SMs each. ``ordinal`` counts the visible ones."""

    ordinal: int
    name: str
    memory_bytes: int | None = None
    sms: int | None = None
    tpcs: int | None = None
    compute_capability: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of SM control: ``smctrl`` (stream masks) or ``green`` (green contexts).

    ``reason``: what was tested, or what is in the way. ``levels``: TPC counts that decode can be given.
    """

    kind: Literal["smctrl", "green"]
    verdict: Verdict
    reason: str
    levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpcs:
    """TPC ids of each GPC, and how many TPCs hosted clusters of each size (as ``{"4": 62}``)."""

    gpcs: tuple[tuple[int, ...], ...]
    hosts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The device curves that serving would start with.

    ``source``: calibrated or measured (on this machine), shipped, or none yet: then a start measures the whole device.
    ``origin``: its file, or its name. ``points``: TPC counts with a compute rate. ``driver``: what it was measured
    with. ``flops`` (FLOP/s) and ``bandwidth`` (bytes/s) are those of the whole device.
    """

    device: str
    source: Literal["calibrated", "shipped", "measured", "none"]
    origin: str | None = None
    points: int | None = None
    age_s: float | None = None
    driver: str | None = None
    flops: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDir:
    """Where curves and learnt models are kept. ``problem``: why it cannot be written."""

    path: str
    writable: bool
    learnt_models: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that was found.

    ``device``: what SGLang would serve on. ``hidden``: what keeps GPUs that are there from being used (as
    ``CUDA_VISIBLE_DEVICES is empty``). ``tested_gpu``: the one that ``ways``, ``gpcs`` and ``profile`` are about.
    """

    machine: Machine
    torch: Torch
    sglang: Sglang
    conflux: Conflux
    device: Literal["cpu", "cuda"]
    hidden: str | None
    driver: Driver | None
    gpus: tuple[Gpu, ...]
    tested_gpu: int | None
    ways: tuple[Way, ...]
    gpcs: Gpcs | None
    profile: Profile
    state_dir: StateDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What conflux would do here.

    ``sm_control``: the way that ``--conflux-sm-control auto`` takes. ``auto_weighs``: the modes that ``auto`` chooses
    from. ``one_after_the_other``: modes whose two halves do not run at once here, if forced.
    """

    possible: bool
    sm_control: Literal["smctrl", "green", "none"]
    auto_weighs: tuple[str, ...]
    one_after_the_other: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Something that could be better, and what to do about it: a command or a flag.

    ``stops_serving``: conflux cannot serve at all until this is done.
    """

    problem: str
    remedy: str
    stops_serving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``--json`` prints."""

    schema: int
    facts: Facts
    serving: Serving
    advice: tuple[Advice, ...]
