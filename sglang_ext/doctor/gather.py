"""Gathers the facts of this machine. Imports neither PyTorch nor SGLang: what may fail or hang runs in children."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_ext import cpu
from sglang_ext.compat import SUPPORTED_SGLANG, sglang_version
from sglang_ext.cpu.machine import ACCELERATOR_NODES, has_accelerator, usable_cores
from sglang_ext.device import Choice, cpu_name, find_profile, measured_unix_s
from sglang_ext.doctor.facts import Conflux, Driver, Facts, Gpcs, Gpu, Machine, Profile, Sglang, StateDir, Torch
from sglang_ext.doctor.probe import Orders
from sglang_ext.doctor.probed import Probed, probe_driver, probe_torch, ways_of
from sglang_ext.sm.select import LIBCUDA, driver_path

LEAST_PYTHON = (3, 11)
PLUGINS = "sglang.srt.plugins"
_CPU_DTYPES = ("bfloat16", "float32", "float16")
_PROC = Path("/proc/driver/nvidia")


class NoSuchGpuError(ValueError):
    """The GPU that was asked for is not there."""


def gather(state_dir: Path, *, ordinal: int = 0, test: bool = True) -> Facts:
    """Everything there is to know, in a few seconds without a GPU. Raises NoSuchGpuError.

    ``test``: run the self-test of SM control, and map the GPCs, on GPU ``ordinal``: the GPU should be idle.
    """
    conflux = _conflux()
    on_cpu = cpu.serves_on_cpu()
    environment = dict(os.environ)
    if on_cpu:  # as when it serves
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() - 1)))
    with ThreadPoolExecutor(2) as pool:
        torch_part = pool.submit(probe_torch, environment)
        orders = Orders(ordinal, driver_path(), str(state_dir), topology=test, self_test=test)
        driver_part = pool.submit(probe_driver, orders) if conflux.extension else None
        probed = driver_part.result() if driver_part else None
        torch_probed = torch_part.result()
    torch, hidden = _torch(torch_probed), _hidden()
    gpus = _gpus(probed, torch_probed)
    chosen = next((gpu for gpu in gpus if gpu.ordinal == ordinal), None)
    if chosen is None and (gpus or ordinal):
        visible = f"{len(gpus)} visible, counted from 0" if gpus else "none is visible"
        raise NoSuchGpuError(f"there is no GPU {ordinal}: {visible}")
    problem = None if conflux.extension else str(conflux.extension_problem)
    if not gpus and on_cpu and LIBCUDA not in os.environ:
        problem = "there is no GPU to control" if hidden is None else hidden
    return Facts(
        machine=_machine(),
        torch=torch,
        sglang=_sglang(),
        conflux=conflux,
        device="cpu" if on_cpu else "cuda",
        hidden=hidden,
        driver=None if problem and not gpus else _driver(probed),
        gpus=gpus,
        tested_gpu=None if chosen is None else ordinal,
        ways=ways_of(probed, problem, _known_offset(probed)),
        gpcs=_gpcs(probed),
        profile=_profile(None if on_cpu else chosen, torch, state_dir),
        state_dir=_state_dir(state_dir),
    )


def _machine() -> Machine:
    system = f"{platform.system()} {platform.release()}"
    with contextlib.suppress(OSError, KeyError):
        system += f", {platform.freedesktop_os_release()['PRETTY_NAME']}"
    try:
        memory: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        memory = None
    return Machine(
        system=system,
        architecture=platform.machine(),
        python=platform.python_version(),
        python_supported=sys.version_info >= LEAST_PYTHON,
        cores=usable_cores(),
        memory_bytes=memory,
    )


def _torch(probed: Probed) -> Torch:
    told = probed.steps.get("torch")
    if told is None:
        version = _version("torch")
        error = "it is not installed" if version is None else f"it cannot be imported: {probed.ended.detail}"
        return Torch(version=version, error=error)
    return Torch(
        version=told["version"],
        cuda=told["cuda"],
        sees_gpus=len(told["gpus"]),
        peers=tuple((high, low) for high, low in told.get("peers", [])),
        threads=told["threads"],
    )


def _sglang() -> Sglang:
    version = sglang_version()
    found = {entry.name for entry in importlib.metadata.entry_points(group=PLUGINS)}
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    problem = None
    if "conflux" not in found:
        problem = "sglang-conflux is not installed in this environment"
    elif allowed and "conflux" not in allowed:
        problem = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves conflux out"
    return Sglang(
        version=version,
        supported=version in SUPPORTED_SGLANG,
        supported_versions=SUPPORTED_SGLANG,
        plugin=problem is None,
        plugin_problem=problem,
    )


def _conflux() -> Conflux:
    version = _version("sglang-conflux")
    try:
        import conflux_native
    except ImportError as error:
        return Conflux(version=version, extension=False, extension_problem=str(error))
    why_not = None if conflux_native.AVAILABLE else str(conflux_native.WHY_NOT)
    return Conflux(version=version, extension=conflux_native.AVAILABLE, extension_problem=why_not)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hidden() -> str | None:
    """What hides GPUs that have device nodes."""
    if has_accelerator():
        return "SGLANG_USE_CPU_ENGINE is 1" if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" else None
    if not any(Path(node).exists() for node in ACCELERATOR_NODES):
        return None
    return f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES') or 'empty'}"


def _driver(probed: Probed | None) -> Driver | None:
    told = probed.steps.get("driver", {}) if probed else {}
    library, number = told.get("library"), told.get("cuda_version")
    version = driver_version(library)
    error = probed.error("driver") if probed else None
    if version is None and library is None and error is None:
        return None
    cuda = None if number is None else f"{number // 1000}.{number % 1000 // 10}"
    return Driver(version=version, cuda=cuda, library=library, error=error)


def driver_version(library: str | None, proc: Path = _PROC) -> str | None:
    """As 580.159.04: from the kernel module's text, else from the library's file name."""
    try:
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", (proc / "version").read_text())
    except OSError:
        found = None
    found = found or re.search(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)$", library or "")
    return found.group(1) if found else None


def _gpus(probed: Probed | None, torch_probed: Probed) -> tuple[Gpu, ...]:
    """Those that PyTorch sees, the one that was opened as the driver says; else the kernel module's names."""
    told = {gpu["ordinal"]: gpu for gpu in torch_probed.steps.get("torch", {}).get("gpus", [])}
    if probed is not None and "name" in probed.gpu:
        told[probed.gpu["ordinal"]] = probed.gpu
    names = [] if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") else _module_names(_PROC)
    if not told and names:
        return tuple(Gpu(ordinal=ordinal, name=name) for ordinal, name in enumerate(names))
    return tuple(_gpu(told[ordinal]) for ordinal in sorted(told))


def _module_names(proc: Path) -> list[str]:
    found = [re.search(r"^Model:\s*(.+)$", file.read_text(), re.M) for file in sorted(proc.glob("gpus/*/information"))]
    return [match.group(1).strip() if match else "unknown GPU" for match in found]


def _gpu(line: dict[str, Any]) -> Gpu:
    fields = {name: line[name] for name in ("ordinal", "name", "memory_bytes", "sms", "compute_capability")}
    return Gpu(**fields, tpcs=max(line["sms"] // 2, 1))


def _known_offset(probed: Probed | None) -> str:
    version = probed.steps.get("driver", {}).get("cuda_version") if probed else None
    if version is None:
        return "nothing is known about this driver"
    from conflux_native.offsets import known_offset

    offset, cuda = known_offset(version), f"CUDA {version // 1000}.{version % 1000 // 10}"
    if offset is None:
        return f"no offset is known for {cuda}: it would be searched"
    return f"offset {offset:#x} is known for {cuda}"


def _gpcs(probed: Probed | None) -> Gpcs | None:
    topology = probed.steps.get("gpcs", {}).get("topology") if probed else None
    if topology is None:
        return None
    return Gpcs(
        gpcs=tuple(tuple(gpc) for gpc in topology["gpcs"]),
        hosts={size: len(tpcs) for size, tpcs in topology["hosts"].items()},
    )


def _profile(gpu: Gpu | None, torch: Torch, state_dir: Path) -> Profile:
    if gpu is not None:
        return _described(gpu.name, find_profile(gpu.name, gpu.tpcs, state_dir) if gpu.tpcs else None)
    names = [cpu_name(dtype, torch.threads or max(1, usable_cores() - 1)) for dtype in _CPU_DTYPES]
    for name in names:
        choice = find_profile(name, 1, state_dir)
        if choice is not None:
            return _described(name, choice)
    return _described(names[0], None)


def _described(name: str, choice: Choice | None) -> Profile:
    if choice is None:
        return Profile(device=name, source="none")
    profile, measured = choice.profile, measured_unix_s(choice.profile)
    return Profile(
        device=name,
        source=choice.source,
        origin=choice.origin,
        points=len(profile.flops),
        age_s=None if measured is None else max(0.0, time.time() - measured),
        driver=profile.provenance.get("driver"),
        flops=profile.flops[-1][1],
        bandwidth=profile.bandwidth[-1][1],
    )


def _state_dir(path: Path) -> StateDir:
    """Whether it can be written, or made. Nothing is made here."""
    problem = None
    try:
        nearest = next(place for place in (path, *path.parents) if place.exists())
        if not nearest.is_dir():
            problem = f"{nearest} is not a directory"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            problem = f"{nearest} may not be written by this user"
        learnt = len(list((path / "learner").glob("learner-*.state")))
    except OSError as error:
        problem, learnt = str(error), 0
    return StateDir(path=str(path), writable=problem is None, learnt_models=learnt, problem=problem)
