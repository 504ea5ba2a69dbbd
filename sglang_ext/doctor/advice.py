"""What conflux will do on a machine, and what its user could change. Pure: from facts to judgements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sglang_ext.config import FORCED_WINDOWS
from sglang_ext.doctor.facts import SCHEMA, Advice, Facts, Report, Serving

MIXED, CONCURRENT = ("temporal", "chunked"), ("spatial", "reserved")
OLD_PROFILE_S = 180 * 86400.0


def judge(facts: Facts) -> Report:
    """Everything that the doctor says."""
    advice = (*obstacles(facts), *improvements(facts))
    return Report(schema=SCHEMA, facts=facts, serving=serving(facts), advice=advice)


def serving(facts: Facts) -> Serving:
    """What a start would do."""
    control = _sm_control(facts)
    at_once = control != "none"
    return Serving(
        possible=next(obstacles(facts), None) is None,
        sm_control=control,
        auto_weighs=(*MIXED, *CONCURRENT) if at_once else MIXED,
        one_after_the_other=() if at_once else FORCED_WINDOWS,
    )


def _sm_control(facts: Facts) -> Literal["smctrl", "green", "none"]:
    if facts.device == "cuda":
        for kind in ("smctrl", "green"):
            if any(way.kind == kind and way.verdict == "passed" for way in facts.ways):
                return kind
    return "none"


def obstacles(facts: Facts) -> Iterator[Advice]:
    """What keeps conflux from serving at all, the first to remove first."""
    machine, torch, sglang = facts.machine, facts.torch, facts.sglang
    wanted = f"sglang=={sglang.supported_versions[-1]}"
    supported = ", ".join(sglang.supported_versions)
    if not machine.python_supported:
        yield _stop(f"Python {machine.python} is too old", "make an environment with Python 3.11 or newer")
    if sglang.version is None:
        remedy = f"pip install {wanted}" if facts.device == "cuda" else "python -m sglang_ext.cpu.install"
        yield _stop("SGLang is not installed in this environment", remedy)
    elif not sglang.supported:
        yield _stop(f"SGLang {sglang.version} is not supported (supported: {supported})", f"pip install {wanted}")
    if not sglang.plugin:
        remedy = "pip install .  # in a checkout of conflux"
        if "SGLANG_PLUGINS" in (sglang.plugin_problem or ""):
            remedy = "add conflux to SGLANG_PLUGINS, or unset it"
        yield _stop(f"SGLang will not know --backend conflux: {sglang.plugin_problem}", remedy)
    if torch.error is not None and sglang.version is not None:
        yield _stop(f"PyTorch cannot be used: {torch.error}", f"pip install --force-reinstall {wanted}")
    if not facts.state_dir.writable:
        yield _stop(
            f"the state directory cannot be written: {facts.state_dir.problem}",
            "--conflux-state-dir DIR, with a directory that can",
        )
    if facts.device == "cuda" and torch.error is None:
        yield from _gpu_obstacles(facts, wanted)


def _gpu_obstacles(facts: Facts, wanted: str) -> Iterator[Advice]:
    torch, driver = facts.torch, facts.driver
    if torch.cuda is None:
        yield _stop(
            f"this machine has a GPU, but PyTorch {torch.version} was built without CUDA",
            f"pip install --force-reinstall {wanted}, or SGLANG_USE_CPU_ENGINE=1 to serve on the CPU",
        )
    elif not torch.sees_gpus:
        served = driver.cuda if driver else None
        if served is not None and _number(served) < _number(torch.cuda):
            yield _stop(
                f"PyTorch was built for CUDA {torch.cuda}, the driver serves CUDA {served} at most",
                f"update the NVIDIA driver to one for CUDA {torch.cuda}",
            )
        else:
            yield _stop(
                "PyTorch sees no GPU" + (f": {driver.error}" if driver and driver.error else ""),
                "see that `nvidia-smi` lists it; a container needs `docker run --gpus all`",
            )


def improvements(facts: Facts) -> Iterator[Advice]:
    """What would make it better, the most useful first."""
    if facts.hidden is not None:
        name = facts.hidden.partition(" ")[0]
        yield Advice(problem=f"a GPU is there, but {facts.hidden}: the CPU serves", remedy=f"unset {name}")
    elif facts.device == "cpu" and facts.gpus:
        yield Advice(
            problem="the driver shows a GPU, but its device files (/dev/nvidia0) are not here: the CPU serves",
            remedy="give the container the GPU's device files, or set SGLANG_USE_CPU_ENGINE=0 to use it nevertheless",
        )
    elif facts.device == "cpu":
        yield Advice(
            problem="there is no GPU here: the CPU serves, which is for trying things out",
            remedy="use a machine with an NVIDIA GPU; a container needs `docker run --gpus all`",
        )
    if facts.device == "cuda":
        yield from _gpu_improvements(facts)


def _gpu_improvements(facts: Facts) -> Iterator[Advice]:
    if not facts.conflux.extension:
        yield Advice(
            problem=f"conflux's compiled extension is missing, so there is no SM control: "
            f"{facts.conflux.extension_problem}",
            remedy="install g++ and Python's headers (python3-dev), then "
            "pip install --force-reinstall --no-deps --no-cache-dir sglang-conflux",
        )
    verdicts = {way.kind: way for way in facts.ways}
    smctrl, green = verdicts.get("smctrl"), verdicts.get("green")
    if smctrl and smctrl.verdict == "not tested":
        yield Advice(problem="SM control was not tested", remedy="conflux doctor, while the GPU is idle")
    elif smctrl and green and smctrl.verdict == "failed" and green.verdict == "passed":
        yield Advice(
            problem=f"stream masks do not work here, so coarser green contexts are used: {smctrl.reason}",
            remedy="nothing needs to be done; a driver for CUDA 12.8 or 13.0 is known to work",
        )
    elif smctrl and facts.conflux.extension and _sm_control(facts) == "none":
        yield Advice(
            problem=f"no way of SM control works here: {smctrl.reason}",
            remedy="a driver for CUDA 12.8 or 13.0 is known to work; --conflux-sm-control none serves without a test",
        )
    profile = facts.profile
    calibrate = "conflux calibrate" + (f" --device {facts.tested_gpu}" if facts.tested_gpu else "")
    current = facts.driver.version if facts.driver else None
    if profile.source == "none":
        yield Advice(problem="this GPU's curves are not known: the first start measures two numbers", remedy=calibrate)
    elif profile.source == "measured":
        yield Advice(problem="only the whole GPU was measured, not parts of it", remedy=calibrate)
    elif profile.source == "shipped":
        yield Advice(problem="the curves are those of another GPU of this model", remedy=calibrate)
    elif current and profile.driver and not profile.driver.startswith(current):
        yield Advice(problem=f"the curves were measured with driver {profile.driver}", remedy=calibrate)
    elif profile.age_s is not None and profile.age_s > OLD_PROFILE_S:
        yield Advice(problem=f"the curves are {profile.age_s / 86400:.0f} days old", remedy=calibrate)


def _stop(problem: str, remedy: str) -> Advice:
    return Advice(problem=problem, remedy=remedy, stops_serving=True)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
