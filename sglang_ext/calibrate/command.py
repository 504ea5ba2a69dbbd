"""The command ``conflux calibrate``."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tqdm import tqdm

from learner.device import DeviceProfile
from sglang_ext import cpu
from sglang_ext.calibrate.assemble import gpu_profile
from sglang_ext.calibrate.curve import Timed, rate
from sglang_ext.calibrate.plot import SUFFIXES, draw
from sglang_ext.calibrate.run import CalibrationError, plan_gpu, run
from sglang_ext.config import default_state_dir
from sglang_ext.device import CALIBRATED, GPU_GEMM_SHAPES, cpu_name, measure, profile_path, shipped_profile
from sglang_ext.doctor.render import flops_text

FAILED = 1
USAGE_ERROR = 2
THIN_SHAPE = (64, 4096, 12288)  # (m, k, n) of a decode step; for context, too thin to show what the device can do
BUSY_SHARE = 0.05
TOTAL_S, LEAST_S = 110.0, 30.0  # in all; for measuring, should looking have taken long
CPU_DTYPES = ("bfloat16", "float32", "float16")


def calibrate_parser() -> argparse.ArgumentParser:
    """The options of ``conflux calibrate``."""
    options = argparse.ArgumentParser(
        prog="conflux calibrate",
        description="Measure what this device computes and reads with each number of its TPCs, for servers that start "
        "afterwards. Takes less than two minutes; the GPU should be idle.",
        epilog="Learnt models belong to the curves that they were learnt with: with new curves learning starts anew.",
        allow_abbrev=False,
    )
    options.add_argument("--device", type=int, default=0, metavar="N", help="which visible GPU (default: 0)")
    options.add_argument(
        "--tpcs", type=_counts, default=(), metavar="N,N,…", help="these TPC counts (default: the planner's levels)"
    )
    options.add_argument("--quick", action="store_true", help="fewer counts, fewer repeats")
    options.add_argument(
        "--dtype", choices=CPU_DTYPES, default="bfloat16", help="on a CPU: the models' (default: bfloat16)"
    )
    options.add_argument(
        "--output", type=Path, metavar="PATH", help="write the profile there instead of where servers look for it"
    )
    options.add_argument(
        "--plot", type=Path, metavar="PATH", help=f"the figure ({', '.join(SUFFIXES)}; default: beside the profile)"
    )
    options.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="what you give --conflux-state-dir (default: ~/.cache/conflux)"
    )
    options.add_argument("--quiet", action="store_true", help="no progress bar")
    return options


def calibrate(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. Returns 0, 1 if nothing could be measured, 2 for options that make no sense."""
    options = calibrate_parser().parse_args(argv)
    options.state_dir = (options.state_dir or default_state_dir()).expanduser()
    try:
        _check_paths(options)
        on_cpu = cpu.prepare()
        profile, timed = _cpu(options) if on_cpu else _gpu(options)
        path = options.output or profile_path(options.state_dir, profile.name)
        profile.save(path)
        figure = options.plot or path.with_suffix(".svg")
        draw(profile, timed, figure)
    except (CalibrationError, OSError, ValueError) as error:
        print(f"conflux calibrate: error: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED if isinstance(error, CalibrationError) else USAGE_ERROR
    print(table(profile, timed))
    print(f"profile: {path}" + ("" if options.output else "; servers that start from now on use it"))
    print(f"figure:  {figure}")
    return 0


def _check_paths(options: argparse.Namespace) -> None:
    """Before minutes are spent. Raises ValueError."""
    for path in (options.output, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"there is no directory {path.absolute().parent}: create it first")
    if options.output is not None and options.output.suffix != ".json":
        raise ValueError(f"--output {options.output}: the name must end in .json")
    if options.plot is not None and options.plot.suffix not in SUFFIXES:
        raise ValueError(f"--plot {options.plot}: the name must end in one of {', '.join(SUFFIXES)}")


def _cpu(options: argparse.Namespace) -> tuple[DeviceProfile, list[Timed]]:
    if options.tpcs or options.device:
        raise ValueError("--tpcs and --device are for GPUs, and this machine serves on its CPU")
    print("The CPU serves here, as a device of one partition: one number each for compute and bandwidth.")
    profile = measure("cpu", options.dtype, cpu_name(options.dtype))
    provenance = {**profile.provenance, "source": CALIBRATED}
    return msgspec.structs.replace(profile, provenance=provenance), []


def _gpu(options: argparse.Namespace) -> tuple[DeviceProfile, list[Timed]]:
    begin_s = time.monotonic()
    with tqdm(unit="set", desc="looking at the GPU", leave=False, disable=True if options.quiet else None) as bar:
        shapes = (*GPU_GEMM_SHAPES, THIN_SHAPE)
        plan = plan_gpu(options.device, options.state_dir, shapes, options.tpcs, quick=options.quick)
        bar.set_description("calibrate")
        bar.reset(total=len(plan.sets))
        left_s = max(LEAST_S, TOTAL_S - (time.monotonic() - begin_s))
        measured = run(plan, lambda done: bar.update(done - bar.n), total_s=left_s)
    for note in plan.notes:
        print(f"note: {note}")
    others = measured.gpu.get("used_by_others", 0.0)
    if others > BUSY_SHARE:
        print(f"note: {100 * others:.0f} % of the GPU's memory is in use: if others compute too, rates come out low")
    timed = [measured.timed[index] for index in sorted(measured.timed)]
    shipped = shipped_profile(measured.gpu["name"], int(measured.gpu["sms"]) // 2)
    return gpu_profile(plan, measured, shipped), timed


def table(profile: DeviceProfile, timed: Sequence[Timed]) -> str:
    """What was measured, one line per set, smallest first; below, what was skipped and the link."""
    lines = [profile.name]
    if not timed:
        lines.append(f"compute {flops_text(profile.flops[-1][1])}, reads {profile.bandwidth[-1][1] / 1e9:.4g} GB/s")
        return "\n".join(lines)
    lines.append(f"{'TPCs':>5}  {'GEMM TFLOP/s':>12}  {'thin TFLOP/s':>12}  {'read GB/s':>10}  set")
    skipped = []
    for one in sorted(timed, key=lambda one: (one.count, one.side)):
        if one.failure:
            skipped.append(f"skipped: {one.count} TPCs ({one.side}): {one.failure}")
            continue
        thin = rate(2.0 * math.prod(THIN_SHAPE), one.gemm_s.get(THIN_SHAPE, ()))
        cells = (_cell(one.flops, 1e12, 12), _cell(thin, 1e12, 12), _cell(one.bandwidth, 1e9, 10))
        lines.append(f"{one.count:>5}  {'  '.join(cells)}  {one.side}")
    lines += skipped
    link = profile.provenance.get("link_bandwidth", "")
    lines.append(f"link to another GPU: {profile.link_bandwidth / 1e9:.4g} GB/s ({link})")
    return "\n".join(lines)


def _cell(value: float | None, unit: float, width: int) -> str:
    return f"{'-' if value is None else format(value / unit, '.1f'):>{width}}"


def _counts(text: str) -> tuple[int, ...]:
    """``8,16,24``, ascending and each once."""
    try:
        counts = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise argparse.ArgumentTypeError(f"TPC counts look like 8,16,24, not {text!r}") from None
    if not counts or counts[0] < 1:
        raise argparse.ArgumentTypeError(f"TPC counts are at least 1, not {text!r}")
    return tuple(counts)
