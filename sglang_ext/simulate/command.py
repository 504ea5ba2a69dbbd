"""``conflux replay --trace``: serve a request trace on simulated time."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from learner.device import DeviceProfile, shipped_names
from learner.estimator import OnlineEstimator
from learner.latency import LatencyModel
from learner.prior import cold_snapshot, shipped_prior
from learner.record_file import RecordFileError, RecordReader
from learner.report import write_json
from learner.shape import ModelShape
from learner.traces import TraceError, TraceRequest, at_rate, cap_lengths, poisson, read_trace, scale_rate
from sglang_ext.simulate import report
from sglang_ext.simulate.host import HostTimes
from sglang_ext.simulate.systems import DEFAULT
from sglang_ext.simulate.xp import serve_on

USAGE_ERROR = 2


def parser() -> argparse.ArgumentParser:
    """The options of ``conflux replay --trace``."""
    options = argparse.ArgumentParser(
        prog="conflux replay",
        description="Serve a request trace on simulated time: the real policy decides, a latency model is the device. "
        "The model is what a record teaches (--record), else the roofline of --model on --device.",
        allow_abbrev=False,
    )
    options.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="Azure CSV or Mooncake JSON lines; .gz is unpacked"
    )
    options.add_argument("--record", type=Path, metavar="FILE", help="learn from this record (--conflux-record)")
    options.add_argument("--model", type=Path, metavar="PATH", help="config.json of a model, or its folder")
    options.add_argument(
        "--device", metavar="NAME", default=None, help=f"{', '.join(shipped_names())}, or a profile's file"
    )
    options.add_argument("--dtype", default="bfloat16", help="of --model (default: bfloat16)")
    options.add_argument("--tp", type=_positive, default=1, help="tensor-parallel size for --model (default: 1)")
    options.add_argument(
        "--systems",
        nargs="+",
        default=list(DEFAULT),
        metavar="NAME",
        help=f"of {', '.join(DEFAULT)}; on N GPUs NAME/tpN, NAME/dpN (N servers, round robin) or conflux-xpN",
    )
    options.add_argument("--limit", type=_positive, metavar="N", help="only the first N requests")
    options.add_argument("--rate", type=_above_zero, metavar="R", help="stretch arrivals to a mean of R requests/s")
    options.add_argument("--scale", type=_above_zero, metavar="F", help="F times the trace's own rate")
    options.add_argument("--poisson", action="store_true", help="requests arrive at random times, at --rate")
    options.add_argument("--longest-input", type=_positive, default=32_000, metavar="N", help="cut prompts to N tokens")
    options.add_argument("--longest-output", type=_positive, default=4_096, metavar="N", help="cut answers to N tokens")
    options.add_argument("--tbt-slo-ms", type=_above_zero, default=50.0, help="target (default: 50)")
    options.add_argument("--ttft-slo-ms", type=_above_zero, default=2000.0, help="target (default: 2000)")
    options.add_argument("--kv-tokens", type=_positive, metavar="N", help="KV slots (default: as many as it takes)")
    options.add_argument("--max-running", type=_positive, default=256, help="most requests at once (default: 256)")
    options.add_argument("--html", type=Path, metavar="PATH", help="write the report as one HTML page")
    options.add_argument("--json", type=Path, metavar="PATH", help="write the figures as JSON")
    options.add_argument("--quiet", action="store_true", help="no progress bar")
    return options


def simulate(argv: Sequence[str] | None = None) -> int:
    """Print and write what each system would have brought. Returns 0, or 2 on an error, which one line explains."""
    options = parser().parse_args(argv)
    try:
        for path in (options.html, options.json):
            if path is not None and not path.parent.is_dir():
                raise FileNotFoundError(f"{path}: there is no directory {path.parent}")
        if options.rate is not None and options.scale is not None:
            raise ValueError("--rate and --scale exclude each other")
        trace = _trace(options)
        model, host, about = _device(options)
        about |= {
            "trace": f"{options.trace.name}: {len(trace):,} requests, {_rate(trace)}",
            "targets": f"TTFT {options.ttft_slo_ms:g} ms, TBT {options.tbt_slo_ms:g} ms",
            "KV slots": "as many as it takes" if options.kv_tokens is None else f"{options.kv_tokens:,}",
        }
        runs = {name: _run(name, trace, model, host, options) for name in dict.fromkeys(options.systems)}
        print(report.text(runs, about))
        if options.html is not None:
            targets_s = 1e-3 * options.tbt_slo_ms, 1e-3 * options.ttft_slo_ms
            options.html.write_text(report.page(runs, about, *targets_s), encoding="utf-8")
            print(f"report: {options.html}")
        if options.json is not None:
            write_json(options.json, report.figures(runs, about))
            print(f"figures: {options.json}")
    except (TraceError, RecordFileError, ValueError, OSError) as error:
        print(f"conflux replay: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def _trace(options: argparse.Namespace) -> list[TraceRequest]:
    trace = read_trace(options.trace, options.limit)
    trace = cap_lengths(trace, input_tokens=options.longest_input, output_tokens=options.longest_output)
    trace = [request for request in trace if request.input_tokens > 0]
    if not trace:
        raise ValueError(f"{options.trace}: no request has a prompt")
    if options.poisson:
        if options.rate is None:
            raise ValueError("--poisson needs a --rate")
        trace = poisson(trace)
    if options.rate is not None:
        return at_rate(trace, options.rate)
    return trace if options.scale is None else scale_rate(trace, options.scale)


def _rate(trace: list[TraceRequest]) -> str:
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    return f"{(len(trace) - 1) / span_s:.3g} requests/s on average" if span_s > 0.0 else "all at once"


def _device(options: argparse.Namespace) -> tuple[LatencyModel, HostTimes, dict[str, str]]:
    """The latency model, the host's times, and where they come from."""
    if options.record is not None:
        if options.model is not None or options.device is not None:
            raise ValueError("--record says which model and device it is of: leave out --model and --device")
        return _learnt(options.record)
    if options.model is None:
        raise ValueError("say what to simulate: --record FILE, or --model PATH and --device NAME")
    name = options.device or "h200"
    profile = DeviceProfile.shipped(name) if name in shipped_names() else DeviceProfile.load(name)
    path = options.model / "config.json" if options.model.is_dir() else options.model
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a model's config")
    shape = ModelShape.from_hf_config(config, name=path.parent.name, dtype=options.dtype, tp=options.tp)
    about = {"model": shape.name, "device": profile.name, "times": "the shipped prior's: nothing was learnt"}
    return LatencyModel(shape, profile, cold_snapshot(profile)), HostTimes(), about


def _learnt(path: Path) -> tuple[LatencyModel, HostTimes, dict[str, str]]:
    with RecordReader(path) as reader:
        header = reader.header
        estimator = OnlineEstimator(header.model, header.device, prior=shipped_prior(header.device))
        iterations = []
        for iteration in reader:
            iterations.append(iteration)
            estimator.observe(iteration)
            if estimator.ready():
                estimator.fit()
    if not estimator.model.version:
        raise ValueError(f"{path}: too few iterations to learn from")
    about = {
        "model": header.model.name,
        "device": header.device.name,
        "times": f"learnt from {len(iterations):,} iterations of {path.name}",
    }
    return estimator.model, HostTimes.of_record(iterations), about


def _run(
    name: str, trace: list[TraceRequest], model: LatencyModel, host: HostTimes, options: argparse.Namespace
) -> report.Simulated:
    tbt_slo_s, ttft_slo_s = 1e-3 * options.tbt_slo_ms, 1e-3 * options.ttft_slo_ms
    hidden = True if options.quiet else None  # None: only on a terminal
    with tqdm(total=len(trace), unit=" requests", desc=name, leave=False, disable=hidden) as bar:
        result, shares = serve_on(
            name,
            trace,
            model,
            tbt_slo_s=tbt_slo_s,
            ttft_slo_s=ttft_slo_s,
            host=host,
            kv_tokens=options.kv_tokens,
            most_running=options.max_running,
            ended=bar.update,
        )
    return report.Simulated(result, result.summary(ttft_slo_s, tbt_slo_s), shares)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0.0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
