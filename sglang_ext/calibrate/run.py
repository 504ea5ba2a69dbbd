"""Runs the measurements in children, goes on behind a set that hangs, and makes the device profile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sglang_ext.calibrate.curve import Timed
from sglang_ext.calibrate.measure import Work
from sglang_ext.calibrate.sets import TpcSet, green_sets, masked_sets
from sglang_ext.doctor.probe import Orders
from sglang_ext.doctor.probed import Probed, probe_driver
from sglang_ext.guarded import run_guarded
from sglang_ext.sm.select import driver_path

FIRST_S = 90.0  # importing PyTorch, making a context
SILENCE_S = 20.0
MOST_CHILDREN = 5
CHILD = (sys.executable, "-P", "-m", "sglang_ext.calibrate.measure")

Way = Literal["smctrl", "green", "none"]


class CalibrationError(RuntimeError):
    """Nothing could be calibrated; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be measured on a GPU and how. ``notes``: what the user should know about it."""

    way: Way
    sets: list[TpcSet]
    work: Work
    cuda_version: int | None = None
    library: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Measured:
    """What the children reported. ``gpu``: name, SMs, software; ``link``: bandwidth to a peer and how it was found."""

    gpu: dict[str, Any] = field(default_factory=dict)
    link: dict[str, Any] = field(default_factory=dict)
    timed: dict[int, Timed] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def take(self, line: dict[str, Any], plan: Plan) -> None:
        """Keep one line of a child."""
        self.last, step = line, line.get("step")
        if step == "ready":
            self.gpu = line
        elif step == "link":
            self.link = line
        elif step in ("set", "failed"):
            one = plan.sets[line["index"]]
            count = one.count or int(self.gpu["sms"]) // 2
            self.timed[line["index"]] = Timed(
                one.side,
                count,
                gemm_s=dict(zip(plan.work.shapes, line.get("gemm_s", ()), strict=False)),
                read_s=line.get("read_s", ()),
                read_bytes=line.get("read_bytes", 0),
                failure=line.get("reason", ""),
            )


def plan_gpu(
    ordinal: int, state_dir: Path, shapes: Sequence[tuple[int, int, int]], counts: Sequence[int], *, quick: bool
) -> Plan:
    """Look at the GPU, in a child, and plan. Raises CalibrationError, ValueError for counts that cannot be."""
    probed = _probe(ordinal, state_dir)
    work = Work(ordinal, driver_path(), 0, [], list(shapes), repeats=5 if quick else 15)
    if probed is None:
        missing = "conflux's extension is not there, so the whole device is measured: see `conflux doctor`"
        return Plan("none", _whole(counts), work, notes=(missing,))
    told = probed.steps.get("driver", {})
    made = Plan("none", [], work, told.get("cuda_version"), told.get("library"))
    error = probed.error("driver") or probed.error("gpu")
    if error is None and not probed.gpu:
        error = f"the driver sees {told.get('gpus', 0)}, counted from 0"
    if error is not None:
        raise CalibrationError(f"GPU {ordinal} cannot be used: {error}")
    slot, topology, green = (probed.steps.get(step, {}) for step in ("slot", "gpcs", "green"))
    if "offset" in slot and "topology" in topology:
        clusters = float(probed.gpu["compute_capability"]) >= 9.0
        sets = _masked(topology["topology"], clusters, counts, quick)
        return replace(made, way="smctrl", sets=sets, work=replace(work, mask_offset=slot["offset"]))
    why = slot.get("error") or topology.get("error") or probed.unfinished or "they were not tested"
    notes: tuple[str, ...] = (f"stream masks cannot be used: {why}",)
    if "least_sms" in green:
        sets = green_sets(probed.gpu["sms"] // 2, (green["least_sms"], green["multiple_sms"]), counts, quick=quick)
        return replace(made, way="green", sets=sets, notes=notes)
    notes += (f"green contexts cannot be used: {green.get('error', why)}", "the whole device alone is measured")
    return replace(made, sets=_whole(counts), notes=notes)


def _probe(ordinal: int, state_dir: Path) -> Probed | None:
    try:
        import conflux_native
    except ImportError:
        return None
    if not conflux_native.AVAILABLE:
        return None
    return probe_driver(Orders(ordinal, driver_path(), str(state_dir), topology=True, slot=True))


def _masked(topology: dict[str, Any], clusters: bool, counts: Sequence[int], quick: bool) -> list[TpcSet]:
    from conflux_native.topology import Topology
    from sglang_ext.sm.planner import MIN_PER_GPC, PartitionPlanner

    known = Topology(
        tpcs=topology["tpcs"],
        gpcs=tuple(tuple(gpc) for gpc in topology["gpcs"]),
        hosts={int(size): frozenset(tpcs) for size, tpcs in topology["hosts"].items()},
    )
    return masked_sets(PartitionPlanner(known, MIN_PER_GPC if clusters else 1), counts, quick=quick)


def _whole(counts: Sequence[int]) -> list[TpcSet]:
    if counts:
        raise ValueError("--tpcs needs SM control, which does not work here: `conflux doctor` says why; leave it out")
    return [TpcSet("whole device", 0)]  # its size is known once PyTorch has looked


def run(
    plan: Plan,
    progress: Callable[[int], None] = lambda done: None,
    *,
    command: Sequence[str] = CHILD,
    first_s: float = FIRST_S,
    silence_s: float = SILENCE_S,
    total_s: float,
) -> Measured:
    """Measure all sets of ``plan``. A set on which a child hangs or crashes is given up; another goes on behind it.

    ``progress`` is told how many sets are done. Raises CalibrationError if a child could not even begin.
    """
    measured = Measured()

    def take(line: dict[str, Any]) -> None:
        measured.take(line, plan)
        progress(len(measured.timed))

    end = time.monotonic() + total_s
    for _ in range(MOST_CHILDREN):
        left = [index for index in range(len(plan.sets)) if index not in measured.timed]
        if not left or time.monotonic() > end:
            break
        orders = [(index, list(plan.sets[index].tpcs), plan.sets[index].green_sms) for index in left]
        stdin = replace(plan.work, sets=orders, peer=not measured.link).encode()
        measured.last = {}
        ended = run_guarded(
            command, take, stdin=stdin, first_s=first_s, silence_s=silence_s, total_s=end - time.monotonic()
        )
        if ended.how == "done":
            break
        how = f"the measuring process {'hung' if ended.how == 'silent' else 'failed'}: {ended.detail}"
        if not measured.last:
            raise CalibrationError(how)
        if not measured.link:
            measured.link = {"bytes_per_s": 0.0, "method": how}
        elif not measured.last.get("hung"):  # it died on a set without a word
            died_on = next((index for index in left if index not in measured.timed), None)
            if died_on is not None:
                take({"step": "failed", "index": died_on, "reason": how})
    for index in range(len(plan.sets)):
        if index not in measured.timed:
            take({"step": "failed", "index": index, "reason": "no time was left for it"})
    return measured
