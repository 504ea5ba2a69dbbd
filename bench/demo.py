"""The whole of conflux in a few minutes: ``python -m bench.demo``.

Serves a real model with ``--backend conflux``, asks it a question, replays a slice of a production trace at it, and
reports how tokens kept their targets and how well the learnt latency model predicted.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bench.client import run_load
from bench.demo_report import Outcome, print_outcome, write_report
from bench.machine_speed import Load, MachineSpeed, ProbeError, measure_speed, scale_to_machine
from bench.model import NAME, ModelError, demo_model
from bench.plan import make_plan
from bench.server import ServerError, ServerProcess
from bench.serving import server_args
from learner.traces import read_trace

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "bench" / "data" / "azure_code_sample.csv"
QUESTION = "What is the capital of France?"
TIME_LIMIT_S = 285
DRAIN_S = 30.0  # for requests still running after the last arrival
REPORT_S = 35.0
STARTUP_TIMEOUT_S = 200.0


class DemoError(RuntimeError):
    """The demo cannot go on; the message is one line for the person who started it."""


WRITTEN = ("record.jsonl", "server.log", "report.html", "load.json", "accuracy.json")
"""What a run leaves in its folder, in place of an earlier run's."""


@dataclass(frozen=True, slots=True)
class Options:
    out: Path
    load_s: float
    mode: str
    seed: int


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="where the report goes")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the replayed load (default: 120)")
    parser.add_argument("--mode", default="auto", help="--conflux-mode of the server (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' token ids (default: 0)")
    given = parser.parse_args(arguments)
    options = Options(given.out, given.seconds, given.mode, given.seed)
    previous = [(sign, signal.signal(sign, _end)) for sign in (signal.SIGTERM, signal.SIGALRM)]
    signal.alarm(TIME_LIMIT_S)
    try:
        run(options)
    except (DemoError, ModelError, ProbeError, ServerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        signal.alarm(0)
        for sign, handler in previous:
            signal.signal(sign, handler)
    return 0


def run(options: Options) -> None:
    """Every step of the demo. Whatever happens, no server is left running."""
    begin_s = time.monotonic()
    _step(1, "model")
    model = demo_model()
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    print(f"  {model}")

    _step(2, "server", "python -m sglang.launch_server --backend conflux")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        (options.out / name).unlink(missing_ok=True)
    record = options.out / "record.jsonl"
    args = server_args(model, record=record, mode=options.mode)
    server = ServerProcess(args, log=options.out / "server.log", cwd=ROOT, startup_timeout_s=STARTUP_TIMEOUT_S)
    try:
        start_s = time.monotonic()
        server.start(on_wait=_ticker("  starting"))
        print(f"\r  up after {time.monotonic() - start_s:.0f} s at {server.url}  (log: {_shown(server.log)})")

        _step(3, "question", QUESTION)
        print(f"  {ask(server.url, QUESTION)}")

        _step(4, "load", f"a slice of {TRACE.name}, scaled to this machine")
        speed = measure_speed(server.url, vocabulary)
        left_s = TIME_LIMIT_S - (time.monotonic() - begin_s) - DRAIN_S - REPORT_S
        load = scale_to_machine(read_trace(TRACE), speed, max(20.0, min(options.load_s, left_s)))
        _describe(speed, load)
        plan = make_plan(
            load.trace,
            vocabulary,
            seed=options.seed,
            custom_params={"ttft_slo_ms": 1e3 * load.ttft_slo_s, "tbt_slo_ms": 1e3 * load.tbt_slo_s},
        )
        result = run_load(server.url, plan, deadline_s=load.duration_s + DRAIN_S, progress="  requests")
        server.check()
        info = server_info(server.url)
    finally:
        server.stop()

    _step(5, "report")
    outcome = Outcome.of(result, load, speed, record, info)
    print_outcome(outcome)
    page = write_report(outcome, options.out)
    print(f"\nreport: {_shown(page)}   record: {_shown(record)}   ({time.monotonic() - begin_s:.0f} s in all)")
    if failures := outcome.failures:
        raise DemoError(f"{len(failures)} of {len(plan)} requests failed: {failures[0]}")


def ask(url: str, question: str) -> str:
    """The model's greedy answer, through the OpenAI-compatible endpoint."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 48,
    }
    answer = _http(f"{url}/v1/chat/completions", body)
    return str(answer["choices"][0]["message"]["content"]).strip()


def server_info(url: str) -> dict[str, Any]:
    """Live state of conflux, from ``/server_info``."""
    states = _http(f"{url}/server_info").get("internal_states") or [{}]
    state = states[0].get("conflux")
    if not isinstance(state, dict):
        raise DemoError("the server does not report a conflux state: it was not served by conflux")
    return state


def _http(url: str, body: dict[str, Any] | None = None, timeout_s: float = 90.0) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            result: dict[str, Any] = json.load(answer)
            return result
    except urllib.error.HTTPError as error:
        text = error.read(200).decode(errors="replace")
        raise DemoError(f"the server answered {url} with {error.code}: {text}") from None


def _describe(speed: MachineSpeed, load: Load) -> None:
    count = len(load.trace)
    inputs = sum(request.input_tokens for request in load.trace) / count
    outputs = sum(request.output_tokens for request in load.trace) / count
    print(
        f"  this machine: prefill {speed.prefill_tokens_per_s:,.0f} tokens/s, "
        f"a decode step of 6 requests {1e3 * speed.decode_step_s:.0f} ms\n"
        f"  {count} requests in {load.duration_s:.0f} s; prompts × {load.input_factor:.3g} (mean {inputs:.0f} tokens), "
        f"answers × {load.output_factor:.3g} (mean {outputs:.0f}), idle time between bursts cut\n"
        f"  targets, sent with every request: TTFT {1e3 * load.ttft_slo_s:,.0f} ms, TBT {1e3 * load.tbt_slo_s:.0f} ms"
    )


def _step(number: int, name: str, detail: str = "") -> None:
    print(f"{number}/5 {name}{': ' if detail else ''}{detail}", flush=True)


def _ticker(label: str) -> Callable[[float], None]:
    """Shows seconds passing, on a terminal only."""

    def tick(seconds: float) -> None:
        if sys.stdout.isatty():
            print(f"\r{label} … {seconds:.0f} s ", end="", flush=True)

    return tick


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _end(sign: int, _: FrameType | None) -> None:
    if sign == signal.SIGALRM:
        raise DemoError(f"not done after {TIME_LIMIT_S} s; the server's log and record are kept")
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
