"""Six minutes at saturation (``python -m bench.soak --output FILE``).

A trained model in bfloat16 (SmolLM2-135M), on a KV pool that is too small for the load, so that requests are retracted.
Prompts of all lengths, aborts at random, ends of sequence inside windows. Every answer is compared with the first one
to the same prompt, made by the same server under little load; where they part both tokens must be a tie
(:mod:`bench.exactness` says why). In the end no KV slot and no request may be left. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench.exactness import ARGS, Work, partings
from bench.machine_facts import machine_facts
from bench.margins import TIE, margins
from bench.model import demo_model, for_ranks
from bench.server import ServerProcess
from bench.switched import conflux_state, set_mode, settle

ROOT = Path(__file__).resolve().parent.parent
STREAMS, FEW_STREAMS, POOL = 96, 8, 24_000
LONGER = 12  # than bench.exactness's answers, or until the model ends them: decodes must outgrow the pool
MODES = ("auto", "spatial", "reserved")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=360.0)
    parser.add_argument("--model", type=Path, help="folder of a trained model (default: SmolLM2-135M)")
    parser.add_argument("--tp", type=int, default=1, help="ranks")
    parser.add_argument("--tbt-slo-ms", type=float, default=10.0)
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "soak")
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[])
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    model = for_ranks(given.model or demo_model(), given.tp)
    work = Work(model)
    args = ["--model-path", str(model), *ARGS, "--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.1"]
    args += ["--backend", "conflux", "--conflux-state-dir", str(given.logs / "state"), *given.server_args]
    args += ["--tp", str(given.tp)]
    with ServerProcess(args, log=given.logs / "soak.log", cwd=ROOT, startup_timeout_s=300.0) as server:
        # The model's own ends of sequence count here.
        expected = asyncio.run(Soak(work, server.url, streams=FEW_STREAMS).ask_each())
        soak = Soak(work, server.url, streams=STREAMS)
        for number, mode in enumerate(MODES):
            set_mode(server.url, mode, given.tbt_slo_ms)
            asyncio.run(soak.run(given.seconds / len(MODES), expected, seed=number))
        empty = settle(server.url)
        state = conflux_state(server.url)
        parted = [(index, at, expected[index], got) for index, at, got in soak.parted]
        gaps = asyncio.run(margins(work.prompts, server.url, parted))
        log = server.log_text()
    pool = state["pool"]
    report = {
        "command": "python -m bench.soak",
        "machine": machine_facts(),
        "seconds": given.seconds,
        "answers": soak.answers,
        "aborted": soak.aborted,
        "errors": soak.errors[:5],
        "parted": len(parted),
        "ties": sum(gap is not None and gap <= TIE for gap in gaps),
        "untied": [
            {"at": at, "of": [len(expected), len(got)], "gap": gap}
            for (_, at, expected, got), gap in zip(parted, gaps, strict=True)
            if gap is None or gap > TIE
        ],
        "retractions": log.count("Retract requests"),
        "tracebacks": log.count("Traceback"),
        "pool_empty": empty and pool["available_slots"] == pool["total_slots"] and pool["free_rows"] == pool["rows"],
        "state": {key: state[key] for key in ("decisions", "fallbacks", "windows", "pool", "lanes")},
    }
    sound = report["ties"] == len(parted) and report["pool_empty"] and not soak.errors and not report["tracebacks"]
    exercised = (
        report["retractions"] and soak.aborted and state["windows"]["ends_at_step"] and state["lanes"]["concurrent"]
    )
    report["passed"] = sound and bool(exercised)
    given.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return int(not report["passed"])


class Soak:
    """Requests of ``work`` again and again, so many at a time."""

    def __init__(self, work: Work, url: str, streams: int) -> None:
        self._work, self._url, self._streams = work, url, streams
        self.answers = self.aborted = 0
        self.errors: list[str] = []
        self.parted: list[tuple[int, int, list[int]]] = []

    def _body(self, index: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": LONGER * self._work.lengths[index]}
        return {"input_ids": self._work.prompts[index], "sampling_params": sampling}

    async def ask_each(self) -> list[list[int]]:
        """Every prompt once."""
        import aiohttp

        room = asyncio.Semaphore(self._streams)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

            async def one(index: int) -> list[int]:
                async with room, session.post(f"{self._url}/generate", json=self._body(index)) as answer:
                    return list((await answer.json())["output_ids"])

            return await asyncio.gather(*map(one, range(len(self._work.prompts))))

    async def run(self, seconds: float, expected: list[list[int]], seed: int) -> None:
        import aiohttp

        until_s = time.monotonic() + seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await asyncio.gather(
                *(self._worker(session, until_s, expected, random.Random(f"{seed}:{n}")) for n in range(self._streams))
            )

    async def _worker(self, session: Any, until_s: float, expected: list[list[int]], rng: random.Random) -> None:
        while time.monotonic() < until_s:
            index = rng.randrange(len(expected))
            try:
                if rng.random() < 0.15:
                    await self._abort(session, index, rng.random() * 0.3)
                    continue
                async with session.post(f"{self._url}/generate", json=self._body(index)) as answer:
                    body = await answer.json()
                got = list(body["output_ids"])
            except Exception as error:  # any failure is a finding
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
                continue
            self.answers += 1
            self.parted += [(index, at, got) for _, at in partings([expected[index]], [got])]

    async def _abort(self, session: Any, index: int, after_s: float) -> None:
        call = asyncio.create_task(self._stream(session, index))
        await asyncio.sleep(after_s)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        self.aborted += 1

    async def _stream(self, session: Any, index: int) -> None:
        async with session.post(f"{self._url}/generate", json=self._body(index) | {"stream": True}) as answer:
            async for _ in answer.content:
                pass


if __name__ == "__main__":
    sys.exit(main())
