"""Tries one way of SM control on every level, in a process of its own: what hangs or crashes here harms nobody else.

``python -m sglang_ext.sm.self_test`` is started by :mod:`sglang_ext.sm.watched`. It says one JSON object a line on its
standard output, before and after everything that may hang:

- ``plan`` with ``levels``, ``topology`` (JSON, for smctrl) and ``gemm``: ``checked``, or why not
- ``level`` with ``tpcs``, then ``done`` with ``tpcs``, ``verdict`` (``ok``, ``wrong``, ``hung``), ``reason`` and
  ``seconds``
- ``error`` with ``reason``: this way cannot work here at all
- ``end``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from sglang_ext.sm.checks import SHAPES, Gemms, WrongError, check_clusters, check_sms, has_clusters, parse_shapes
from sglang_ext.sm.control import SmControl


def main(line: Sequence[str] | None = None) -> NoReturn:
    """Run the test; never returns."""
    options = _parse(line)
    # Should the parent be killed, this ends even while a call into the driver hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(options.limit, 1.0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.flush()
    voice = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print

    def say(**message: object) -> None:
        os.write(voice, json.dumps(message).encode() + b"\n")

    status = 0
    try:
        _work(options, say)
        say(event="end")
    except BaseException as error:
        status = 1
        with contextlib.suppress(OSError):
            say(event="error", reason=str(error) or type(error).__name__)
    # Not by the usual way out: the driver would wait for kernels that never end.
    os._exit(status)


def _parse(line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ext.sm.self_test",
        description="Internal to conflux: tries a way of SM control, which may hang. Use `conflux doctor`.",
    )
    parser.add_argument("kind", choices=("smctrl", "green"))
    parser.add_argument("--driver", default="libcuda.so.1", help="path of libcuda")
    parser.add_argument("--ordinal", type=int, default=0, help="CUDA device")
    parser.add_argument("--uuid", default="", help="refuse another GPU than this one")
    parser.add_argument("--offset", type=lambda text: int(text, 0), help="of the mask, verified before (smctrl)")
    parser.add_argument("--topology", default="", help="as JSON; measured if left out (smctrl)")
    parser.add_argument("--levels", type=lambda text: [int(part) for part in text.split(",")], help="test these alone")
    parser.add_argument("--only", type=int, help="plan one level, near this many TPCs")
    parser.add_argument(
        "--gemm", choices=("require", "auto", "skip"), default="auto", help="auto: where torch has CUDA"
    )
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help="of the GEMMs, as KxN,KxN,…")
    parser.add_argument("--probe-timeout", type=float, default=5.0, help="seconds for one step")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which the kernel ends this process")
    return parser.parse_args(line)


def _work(options: argparse.Namespace, say: Any) -> None:
    from conflux_native._core import Device, Driver

    device = Device(Driver(options.driver), options.ordinal)
    if options.uuid and device.uuid != options.uuid:
        raise RuntimeError(
            f"device {options.ordinal} is {device.uuid} in a new process but {options.uuid} in the one that asks: "
            "set CUDA_VISIBLE_DEVICES before a process first uses CUDA, and not again"
        )
    control, topology = _control(options, device)
    gemms, gemm = _gemms(options)
    say(event="plan", levels=list(control.levels), gemm=gemm, topology=topology)
    for tpcs in control.levels:
        say(event="level", tpcs=tpcs)
        begin_s = time.monotonic()
        verdict, reason = try_level(device, control, tpcs, gemms, options.probe_timeout)
        seconds = round(time.monotonic() - begin_s, 3)
        say(event="done", tpcs=tpcs, verdict=verdict, reason=reason, seconds=seconds)
        if verdict != "ok":
            return  # the device may be stuck, and a way that is wrong once is not used


def try_level(device: Any, control: SmControl, tpcs: int, gemms: Gemms | None, timeout_s: float) -> tuple[str, str]:
    """Run every check on one level: (``ok``, ""), or ``wrong`` or ``hung`` and why."""
    try:
        check_sms(device, control, tpcs, timeout_s)
        check_clusters(device, control, tpcs, timeout_s)
        if gemms is not None:
            gemms.check(device, control.handles(tpcs), timeout_s)
    except WrongError as error:
        return "wrong", str(error)
    except TimeoutError as error:
        return "hung", str(error)
    return "ok", ""


def _control(options: argparse.Namespace, device: Any) -> tuple[SmControl, str]:
    """The control, and the topology that it was planned on, in JSON."""
    from sglang_ext.sm.build import green_control, plan_green, plan_smctrl, smctrl_control

    if options.kind == "green":
        levels = tuple(options.levels or plan_green(device, options.only))
        return green_control(device, levels), ""
    from conflux_native.measure import measure_topology
    from conflux_native.topology import Topology

    limit_s = 2 * options.probe_timeout
    topology = Topology.from_json(options.topology) if options.topology else measure_topology(device, limit_s)
    planner = plan_smctrl(topology, options.only, clusters=has_clusters(device))
    levels = tuple(options.levels or planner.levels)
    return smctrl_control(device, options.offset, planner, levels), topology.to_json()


def _gemms(options: argparse.Namespace) -> tuple[Gemms | None, str]:
    if options.gemm == "skip":
        return None, "not checked: nobody asked"
    try:
        return Gemms(options.ordinal, options.shapes), "checked"
    except (ImportError, RuntimeError) as error:
        if options.gemm == "require":
            raise
        return None, f"not checked: {error}"


if __name__ == "__main__":
    main()
