"""Chooses the way of SM control: stream masks, else green contexts, else none; the reasons stay known."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import time
from pathlib import Path
from typing import Any, Literal

from sglang_ext.config import default_state_dir
from sglang_ext.sm.checks import SHAPES, Shapes, check_sms, has_clusters, shapes_text
from sglang_ext.sm.control import Kind, NoControl, SmControl
from sglang_ext.sm.memory import Memory
from sglang_ext.sm.watched import Limits, Report, run_self_test

WAYS: tuple[Kind, ...] = ("smctrl", "green")
NAMES: dict[Kind, str] = {"smctrl": "stream masks", "green": "green contexts", "none": "none"}
LIBCUDA = "CONFLUX_LIBCUDA"
"""Environment variable that names the driver's library, where it is not the system's."""

Gemm = Literal["require", "auto", "skip"]

_VERSION = 2
"""Raised when the planner's sets or the checks change: what an older version found is then found anew."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The control to use and why.

    ``reasons``: for each way that is not in use why not, in words for the operator; for the one in use what was tested.
    ``reports``: what the self-test found, now or at an earlier start, for each way that got that far. ``seconds`` is
    what the choice took.
    """

    control: SmControl
    wanted: str
    reasons: dict[str, str]
    reports: dict[str, Report] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    has_sms: bool = True

    @property
    def fell_back(self) -> bool:
        """Less is in use than was asked for. ``auto`` asks a GPU for the best way and a CPU for nothing."""
        if self.wanted == "auto":
            return self.has_sms and self.control.kind != WAYS[0]
        return self.control.kind != self.wanted

    def state(self) -> dict[str, Any]:
        """Plain values for ``/server_info``."""
        return {
            "wanted": self.wanted,
            "kind": self.control.kind,
            "levels": list(self.control.levels),
            "reasons": dict(self.reasons),
        }


def choose(
    kind: str = "auto",
    ordinal: int | None = 0,
    state_dir: str | os.PathLike[str] | None = None,
    log: logging.Logger | None = None,
    *,
    only: int | None = None,
    gemm: Gemm = "auto",
    shapes: Shapes = SHAPES,
    memory: bool = True,
    limits: Limits | None = None,
) -> Chosen:
    """The best of the ways that pass their test on CUDA device ``ordinal`` (None: a CPU). Never raises.

    ``kind``: ``auto`` and ``smctrl`` try stream masks, then green contexts; ``green`` those alone; ``none`` nothing.
    Each way is tested in a process of its own (a hang costs that process), then by where kernels run in this one.
    A passed test is remembered in ``state_dir`` (None: ``~/.cache/conflux``) for this GPU, driver, torch and conflux;
    ``memory`` False neither reads nor writes that. ``only``: plan one level, the nearest possible to so many TPCs.
    ``gemm``: whether the test must include torch's GEMMs (``require``: what serves), or does where torch has CUDA
    (``auto``), or does without (``skip``). ``shapes``: (K, N) of the linear layers that will be served, each rank's own
    with tensor parallelism; which GEMMs the test runs. The outcome is logged once.
    """
    begin_s = time.monotonic()
    if ordinal is None:
        chosen = Chosen(NoControl(), kind, dict.fromkeys(WAYS, "a CPU has no SMs"), has_sms=False)
    elif kind == "none":
        chosen = Chosen(NoControl(), kind, dict.fromkeys(WAYS, "--conflux-sm-control none"))
    else:
        folder = _folder(state_dir) if memory else None
        choice = _Choice(kind, ordinal, folder, only, gemm, shapes_text(shapes or SHAPES), limits or Limits())
        chosen = dataclasses.replace(choice.make(), seconds=time.monotonic() - begin_s)
    if log is not None:
        _say(chosen, log)
    return chosen


def _say(chosen: Chosen, log: logging.Logger) -> None:
    kind = chosen.control.kind
    if chosen.fell_back:
        why = "; ".join(f"{NAMES[way]} ({way}): {chosen.reasons[way]}" for way in WAYS if way != kind)
        log.warning("conflux: SM control asked for: %s, in use: %s. %s", chosen.wanted, kind, why)
    if kind != "none":
        log.info("conflux: SM control by %s (%s, %.1f s): %s", NAMES[kind], kind, chosen.seconds, chosen.reasons[kind])


class _Choice:
    """One run of the choice."""

    def __init__(
        self,
        wanted: str,
        ordinal: int,
        folder: Path | None,
        only: int | None,
        gemm: Gemm,
        shapes: str,
        limits: Limits,
    ) -> None:
        self.wanted = wanted
        self.ordinal = ordinal
        self.folder = folder
        self.memory = Memory(folder)
        self.only = only
        self.gemm = gemm
        self.shapes = shapes
        self.limits = limits
        self.reasons: dict[str, str] = {}
        self.reports: dict[str, Report] = {}
        self.driver: Any = None
        self.device: Any = None

    def make(self) -> Chosen:
        usable = self._open()
        control: SmControl | None = None
        for way in WAYS:
            if control is not None:
                self.reasons[way] = f"not needed: {control.kind} is in use"
            elif self.wanted == "green" != way:
                self.reasons[way] = "--conflux-sm-control green"
            elif usable:
                control = self._try(way)
        return Chosen(control or NoControl(), self.wanted, self.reasons, self.reports)

    def _open(self) -> bool:
        """Whether the driver and the GPU can be used at all; if not, the reason stands for both ways."""
        try:
            import conflux_native

            if not conflux_native.AVAILABLE:
                raise RuntimeError(conflux_native.WHY_NOT)
            self.driver = conflux_native.Driver(driver_path())
            self.device = conflux_native.Device(self.driver, self.ordinal)
        except Exception as error:
            self.reasons.update(dict.fromkeys(WAYS, _words(error)))
            return False
        return True

    def _try(self, way: Kind) -> SmControl | None:
        """A way's control, or None with its reason."""
        try:
            return self._tested(way)
        except Exception as error:
            self.reasons[way] = _words(error)
            return None

    def _tested(self, way: Kind) -> SmControl:
        offset = self._offset() if way == "smctrl" else None
        key = self._key(way, offset)
        report = self.memory.recall(key)
        if report is not None and (report.gemm == "checked" or self.gemm != "require"):
            try:
                control = self._in_use(way, offset, report)
            except Exception:
                # What was remembered no longer holds, so it is found out anew, in a child first.
                self.memory.forget(key)
            else:
                self._passed(way, report, "remembered")
                return control
        report = run_self_test(way, self._arguments(offset), self.limits)
        self.reports[way] = report
        if not report.ok:
            raise RuntimeError(f"the self-test failed: {report.reason}")
        control = self._in_use(way, offset, report)
        self.memory.keep(key, report)
        self._passed(way, report, "now")
        return control

    def _passed(self, way: Kind, report: Report, when: str) -> None:
        self.reports[way] = report
        levels = ", ".join(map(str, report.levels))
        said = f"decode on {levels} of {self.device.sm_count // 2} TPCs tested ({when}, {report.seconds:.1f} s)"
        if report.gemm != "checked":
            said += f"; GEMMs {report.gemm}"
        said += "".join(f"; {tpcs} not offered: {why}" for tpcs, why in sorted(report.lost.items()))
        self.reasons[way] = said

    # ---- what the ways are made of

    def _offset(self) -> int:
        """The mask's place in a stream, as verified in a child process now or earlier. Raises with the reason."""
        from conflux_native.search import find_slot

        found = find_slot(
            self.ordinal, driver_path=self.driver.path, remembered_dir=self.folder, use_memory=self.folder is not None
        )
        return found.offset

    def _arguments(self, offset: int | None) -> list[str]:
        arguments = [f"--driver={self.driver.path}", f"--ordinal={self.ordinal}", f"--uuid={self.device.uuid}"]
        arguments += [f"--gemm={self.gemm}", f"--shapes={self.shapes}"]
        if offset is not None:
            arguments.append(f"--offset={offset:#x}")
        if self.only is not None:
            arguments.append(f"--only={self.only}")
        return arguments

    def _in_use(self, way: Kind, offset: int | None, report: Report) -> SmControl:
        """The control in this process, checked by where its kernels run. Raises if anything is not as tested."""
        from sglang_ext.sm.build import green_control, plan_smctrl, smctrl_control

        control: SmControl
        if way == "green":
            control = green_control(self.device, report.levels)
        else:
            from conflux_native.topology import Topology

            assert offset is not None
            planner = plan_smctrl(Topology.from_json(report.topology), self.only, clusters=has_clusters(self.device))
            control = smctrl_control(self.device, offset, planner, report.levels)
        try:
            for level in control.levels:
                check_sms(self.device, control, level, self.limits.probe_s)
        except Exception:
            # After a time-out nothing can be destroyed; the failure is what counts.
            _quietly(control.close)
            raise
        return control

    def _key(self, way: Kind, offset: int | None) -> dict[str, str | int]:
        from conflux_native.search import key_of

        return {
            **key_of(self.driver, self.device),
            "uuid": self.device.uuid,
            "torch": _version("torch"),
            "way": way,
            "offset": offset or 0,
            "only": self.only or 0,
            "shapes": self.shapes,
            "version": _VERSION,
        }


def driver_path() -> str:
    """libcuda as the dynamic linker finds it, or the one that ``CONFLUX_LIBCUDA`` names."""
    return os.environ.get(LIBCUDA) or "libcuda.so.1"


def _folder(state_dir: str | os.PathLike[str] | None) -> Path | None:
    try:
        return Path(state_dir or default_state_dir()) / "sm"
    except RuntimeError:
        return None  # a user without a home


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _quietly(function: Any) -> None:
    try:
        function()
    except Exception as error:
        logging.getLogger(__name__).debug("conflux: while giving up a way of SM control: %r", error)
