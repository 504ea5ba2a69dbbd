"""A report as text for people, or as JSON with the field names of :mod:`sglang_ext.doctor.facts`."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable

from sglang_ext.doctor.facts import Driver, Facts, Gpcs, Gpu, Profile, Report, StateDir, Torch

WIDTH = 100
_LABEL = 12

Row = tuple[str, str]


def as_json(report: Report) -> str:
    return json.dumps(dataclasses.asdict(report), indent=2)


def as_text(report: Report) -> str:
    """Sections of labelled lines, each at most WIDTH wide where its words allow."""
    facts = report.facts
    sections: list[tuple[str, list[Row]]] = [
        ("this machine", _machine(facts)),
        ("GPU", _gpu(facts)),
        ("SM control", [(way.kind, f"{way.verdict}: {way.reason}") for way in facts.ways]),
        ("what conflux knows", [("curves", _profile(facts.profile)), ("state", _state(facts.state_dir))]),
        ("what conflux does here", _serving(report)),
    ]
    lines = []
    for title, rows in sections:
        lines += [title, *_rows(rows), ""]
    lines += ["what you could change", *_advice(report)]
    return "\n".join(lines)


def _machine(facts: Facts) -> list[Row]:
    machine, sglang, conflux = facts.machine, facts.sglang, facts.conflux
    memory = "" if machine.memory_bytes is None else f", {_gib(machine.memory_bytes)} of memory"
    supported = "supported" if sglang.supported else f"not supported: {', '.join(sglang.supported_versions)} is"
    extension = "with its extension" if conflux.extension else f"without its extension: {conflux.extension_problem}"
    plugin = "" if sglang.plugin else f"; {sglang.plugin_problem}"
    return [
        ("system", f"{machine.system}, {machine.architecture}, {_count(machine.cores, 'core')}{memory}"),
        ("Python", machine.python + ("" if machine.python_supported else ", too old")),
        ("PyTorch", _torch(facts.torch)),
        ("SGLang", (f"{sglang.version}, {supported}" if sglang.version else "not installed") + plugin),
        ("conflux", f"{conflux.version or 'not installed (runs from its sources)'}, {extension}"),
    ]


def _torch(torch: Torch) -> str:
    if torch.error is not None:
        return f"{torch.version}: {torch.error}" if torch.version else torch.error
    return f"{torch.version}, " + (f"for CUDA {torch.cuda}" if torch.cuda else "without CUDA")


def _gpu(facts: Facts) -> list[Row]:
    rows = [("driver", _driver(facts.driver))]
    for gpu in facts.gpus:
        rows.append((f"GPU {gpu.ordinal}", _one_gpu(gpu)))
    if len(facts.gpus) > 1:
        rows.append(("GPU links", _links(len(facts.gpus), facts.torch.peers)))
    if not facts.gpus:
        rows.append(("GPU", facts.hidden or "none"))
    if facts.gpcs is not None:
        rows += _gpcs(facts.gpcs)
    return rows


def _links(gpus: int, peers: tuple[tuple[int, int], ...]) -> str:
    """Which GPUs several ranks could be put on."""
    if len(peers) == gpus * (gpus - 1) // 2:
        return "every GPU reaches every other's memory"
    if not peers:
        return "no GPU reaches another's memory: several ranks talk through the host"
    return ", ".join(f"{low} and {high}" for high, low in peers) + " reach each other's memory"


def _driver(driver: Driver | None) -> str:
    if driver is None:
        return "none"
    parts = [driver.version or "", f"CUDA {driver.cuda}" if driver.cuda else "", driver.library or ""]
    return ", ".join(part for part in [*parts, driver.error or ""] if part)


def _one_gpu(gpu: Gpu) -> str:
    parts = [gpu.name]
    if gpu.memory_bytes is not None:
        parts.append(_gib(gpu.memory_bytes))
    if gpu.sms is not None:
        parts.append(f"{gpu.sms} SMs in {gpu.tpcs} TPCs")
    if gpu.compute_capability is not None:
        parts.append(f"compute capability {gpu.compute_capability}")
    return ", ".join(parts)


def _gpcs(gpcs: Gpcs) -> list[Row]:
    shared = [gpc for gpc in gpcs.gpcs if len(gpc) > 1]
    alone = [gpc[0] for gpc in gpcs.gpcs if len(gpc) == 1]
    rows = [(f"GPC {at}", f"TPCs {_ids(gpc)}") for at, gpc in enumerate(shared)]
    if alone:
        rows.append(("alone", f"TPCs {_ids(alone)}"))
    hosted = ", ".join(f"of {size} blocks: {count}" for size, count in sorted(gpcs.hosts.items(), key=_by_size))
    return [*rows, ("clusters", f"TPCs that host them, {hosted}" if hosted else "none ran")]


def _by_size(item: tuple[str, int]) -> int:
    return int(item[0])


def _ids(tpcs: Iterable[int]) -> str:
    return " ".join(map(str, tpcs))


def _profile(profile: Profile) -> str:
    if profile.source == "none":
        return f"none yet for {profile.device}: the first start measures the whole device, in about a second"
    age = "" if profile.age_s is None else f" {_age(profile.age_s)} ago"
    whole = f"{flops_text(profile.flops or 0.0)}, {(profile.bandwidth or 0) / 1e9:.4g} GB/s"
    points = "" if profile.points == 1 else f" on all TPCs, {profile.points} points"
    return f"{profile.source}{age}: {profile.device}, {whole}{points} ({profile.origin})"


def flops_text(flops: float) -> str:
    """In TFLOP/s, a CPU's in GFLOP/s."""
    return f"{flops / 1e12:.4g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.4g} GFLOP/s"


def _age(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours" if seconds < 172800 else f"{seconds / 86400:.0f} days"


def _state(state: StateDir) -> str:
    learnt = _count(state.learnt_models, "learnt model")
    return f"{state.path}, " + (f"writable, {learnt}" if state.writable else f"not writable: {state.problem}")


def _serving(report: Report) -> list[Row]:
    serving = report.serving
    if not serving.possible:
        return [("serves", "not at all, see below")]
    device = "the CPU" if report.facts.device == "cpu" else "the GPU"
    control = {"smctrl": "stream masks", "green": "green contexts", "none": "none"}[serving.sm_control]
    if report.facts.device == "cpu":
        control += ": a CPU has no SMs"
    elif serving.sm_control != "none":
        control += ", on one GPU with FlashAttention 3"
    rows = [
        ("serves", f"on {device}: python -m sglang.launch_server --model-path MODEL --backend conflux"),
        ("auto", f"weighs {', '.join(serving.auto_weighs[:-1])} and {serving.auto_weighs[-1]} by prediction"),
        ("SM control", control),
    ]
    if serving.one_after_the_other:
        halves = ", ".join(serving.one_after_the_other)
        rows.append(("forced", f"{halves}: prefill and decode run one after the other"))
    return rows


def _advice(report: Report) -> list[str]:
    if not report.advice:
        return ["  nothing: all is well"]
    lines = []
    for advice in report.advice:
        mark = "must" if advice.stops_serving else "may"
        lines += _wrapped(f"  {mark:{_LABEL}}", advice.problem)
        # Not wrapped: it is there to be copied.
        lines.append(f"  {'':{_LABEL}}-> {advice.remedy}")
    return lines


def _rows(rows: Iterable[Row]) -> list[str]:
    return [line for label, text in rows for line in _wrapped(f"  {label:{_LABEL}}", text)]


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
