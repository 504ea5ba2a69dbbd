"""Does ``auto`` pick the mode that measures best (``python -m bench.modes --output FILE``)?

A grid of decode batch, context, prefill length and target. In each cell so many requests decode while prompts arrive,
each when the one before has its first token; the same server runs them in each forced mode and in ``auto``, in turns. A
trial, some prompts long, counts tokens per second (the prompts' and those decoded meanwhile, from the first one's
arrival to the last one's first token) and the largest gap between two tokens of a decode. Of the forced modes that is
best which serves most without a gap above the target; if all exceed it, that with the smallest gap. Results are medians
over the trials of a cell; the table grows with every run of the script until it is complete. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.client import COMPLETION_TOKENS
from bench.machine_facts import machine_facts
from bench.server import ServerError, ServerProcess
from bench.shapes import SHAPES, gpu_args, shape_folder
from bench.switched import conflux_state, idle, set_mode

ROOT = Path(__file__).resolve().parent.parent
FORCED = ("temporal", "chunked", "spatial", "reserved")
WITHIN, APART = 0.03, 0.10
# A trial lasts so long and until its last prompt is served: arrivals fall anywhere within an iteration.
TRIAL_S, WARM_UP_TRIALS, ENDLESS = 0.6, 1, 20_000


class Cell(NamedTuple):
    batch: int
    context: int
    prefill: int
    tbt_slo_ms: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; complete cells there are left out")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--prefills", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--targets", type=float, nargs="*", default=[25.0, 50.0, 100.0], help="TBT, in ms")
    parser.add_argument("--trials", type=int, default=3, help="of each mode in each cell (default: 3)")
    parser.add_argument("--model", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--until", type=float, default=440.0, help="end so many seconds after the start")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "modes")
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {"cells": []}
    grid = itertools.product(given.batches, given.contexts, given.targets)
    given.logs.mkdir(parents=True, exist_ok=True)
    args = gpu_args(shape_folder(given.model, given.logs), decode_graph_batch=max(given.batches))
    args += ["--backend", "conflux"]
    args += ["--conflux-state-dir", str(given.logs / "state"), "--conflux-record", str(given.logs / "modes.jsonl.gz")]
    # What decodes may still ask for is far more than they get: all are admitted.
    args += ["--schedule-conservativeness", "0.1"]
    with ServerProcess(args, log=given.logs / "modes.log", cwd=ROOT, startup_timeout_s=300.0) as server:
        begin_s = time.monotonic()
        for batch, context, target in grid:
            known = {tuple(cell["cell"]) for cell in report["cells"]}
            left = [p for p in given.prefills if (batch, context, p, target) not in known]
            if not left:
                continue
            if time.monotonic() - begin_s > given.until:
                print("run again to go on")
                return 3
            for prefill in left:
                cell = uvloop.run(_measure(server.url, Cell(batch, context, prefill, target), given))
                report["cells"].append(cell)
                print(json.dumps(cell), flush=True)
                # The decodes' prompts stay in the cache for the next cell.
                if not idle(server.url):
                    raise ServerError("requests that were cut off are still running")
            report |= {"machine": machine_facts(), "model": f"{given.model}'s shape, random weights"}
            report |= {
                "command": "python -m bench.modes",
                "state": conflux_state(server.url),
                **verdict(report["cells"]),
            }
            given.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(verdict(report["cells"])))
    return 0


async def _measure(url: str, cell: Cell, given: argparse.Namespace) -> dict[str, Any]:
    """One cell, with decodes of its own, of the same prompts in cells that differ in no more than target and prefill:
    their contexts grow from trial to trial."""
    import aiohttp

    ids = range(256, SHAPES[given.model]["vocab_size"])
    rng, known = random.Random(str(cell)), random.Random(f"{cell.batch}:{cell.context}")
    params = {"tbt_slo_ms": cell.tbt_slo_ms}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        decodes = [Stream(session, url, known.choices(ids, k=cell.context), ENDLESS, params) for _ in range(cell.batch)]
        tasks = [asyncio.create_task(decode.run()) for decode in decodes]
        try:
            while not all(len(decode.event_s) > 4 for decode in decodes):
                if any(task.done() for task in tasks):
                    raise ServerError("a decode ended before the trials: see the server's log")
                await asyncio.sleep(0.05)
            trials: dict[str, list[tuple[float, float]]] = {mode: [] for mode in (*FORCED, "auto")}
            for trial in range(WARM_UP_TRIALS + given.trials):
                for mode, measured in trials.items():
                    await asyncio.to_thread(set_mode, url, mode, cell.tbt_slo_ms)
                    one = await _trial(session, url, decodes, lambda: rng.choices(ids, k=cell.prefill), params)
                    if trial >= WARM_UP_TRIALS:
                        measured.append(one)
            return _cell(cell, trials)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _trial(
    session: Any, url: str, decodes: list[Stream], prompt: Callable[[], list[int]], params: dict[str, float]
) -> tuple[float, float]:
    """(tokens per second, largest gap in ms) while prompts are served beside the decodes."""
    from_s, prefilled = time.perf_counter(), 0
    while True:
        one = Stream(session, url, prompt(), 1, params)
        await one.run()
        prefilled += one.prompt_tokens
        until_s = one.event_s[0]
        if until_s - from_s > TRIAL_S:
            break
    await asyncio.sleep(0.15)  # the gap that its end may have caused
    made = sum(decode.made(until_s) - decode.made(from_s) for decode in decodes)
    gaps_s = [gap_s for decode in decodes for gap_s in decode.gaps_s(from_s, until_s + 0.1)]
    return (prefilled + made) / (until_s - from_s), 1e3 * max(gaps_s, default=0.0)


class Stream:
    """One request and when its tokens came."""

    def __init__(self, session: Any, url: str, prompt: list[int], tokens: int, params: dict[str, float]) -> None:
        self._session, self._url, self.prompt_tokens = session, f"{url}/generate", len(prompt)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": params}
        self._body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        self.event_s: list[float] = []
        self._tokens: list[int] = []

    async def run(self) -> None:
        async with self._session.post(self._url, json=self._body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: ") and (match := COMPLETION_TOKENS.search(line)):
                    self.event_s.append(time.perf_counter())
                    self._tokens.append(int(match[1]))

    def made(self, by_s: float) -> int:
        """Tokens that had come by then."""
        events = bisect.bisect_right(self.event_s, by_s)
        return self._tokens[events - 1] if events else 0

    def gaps_s(self, from_s: float, until_s: float) -> Iterator[float]:
        """Gaps that overlap the time."""
        for early, late in itertools.pairwise(self.event_s):
            if late > from_s and early < until_s:
                yield late - early


def _cell(cell: Cell, trials: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    modes = {
        mode: {
            "tokens_per_s": round(statistics.median(rate for rate, _ in measured), 1),
            "largest_gap_ms": round(statistics.median(gap for _, gap in measured), 2),
        }
        for mode, measured in trials.items()
    }
    return {"cell": list(cell), "modes": modes, **judged(cell.tbt_slo_ms, modes)}


def judged(tbt_slo_ms: float, modes: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Which forced mode is best, how far the worst is behind, and whether ``auto`` is within 3 % of the best."""
    forced = {mode: modes[mode] for mode in FORCED}
    keep = {mode: one for mode, one in forced.items() if one["largest_gap_ms"] <= tbt_slo_ms}
    auto = modes["auto"]
    if keep:
        best = max(keep, key=lambda mode: keep[mode]["tokens_per_s"])
        most = keep[best]["tokens_per_s"]
        # A mode that breaks the target while another keeps it is worse by more than any share.
        apart = len(keep) < len(forced) or min(one["tokens_per_s"] for one in keep.values()) < (1 - APART) * most
        good = auto["largest_gap_ms"] <= tbt_slo_ms and auto["tokens_per_s"] >= (1 - WITHIN) * most
    else:
        best = min(forced, key=lambda mode: forced[mode]["largest_gap_ms"])
        least = forced[best]["largest_gap_ms"]
        apart = max(one["largest_gap_ms"] for one in forced.values()) > (1 + APART) * least
        good = auto["largest_gap_ms"] <= (1 + WITHIN) * least
    return {"best": best, "kept": bool(keep), "apart": apart, "auto_is_as_good": good}


def verdict(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all cells measured."""
    count = max(len(cells), 1)
    return {
        "cells_measured": len(cells),
        "share_apart": round(sum(cell["apart"] for cell in cells) / count, 3),
        "share_auto_as_good": round(sum(cell["auto_is_as_good"] for cell in cells) / count, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
