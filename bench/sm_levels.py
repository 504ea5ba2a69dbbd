"""Put every level that the planner offers to work (``python -m bench.sm_levels --output FILE``).

For each level, in a process of its own with a time limit: bf16 GEMMs of Qwen3-8B's shapes and of a small model's with M
from 1 to 8192, FA3 prefill and decode on both sides, and a Qwen3-8B-shaped decode step as a CUDA graph on decode's side
while GEMMs run on prefill's. Results are compared with those of an ordinary stream. A level that the start-up self-test
has already lost fails. Needs an NVIDIA GPU and sgl_kernel.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 4096, 32, 8, 128, 12288, 36
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
LINEARS = {
    "qkv": (HIDDEN, QKV),
    "o": (HEADS * HEAD_DIM, HIDDEN),
    "gate_up": (HIDDEN, 2 * INTERMEDIATE),
    "down": (INTERMEDIATE, HIDDEN),
}
# On two TPCs in each GPC some of these never ended, while all of the above did: not all shapes take the same clusters.
SMALL_LINEARS = {
    "small qkv": (1024, 2048),
    "small o": (1024, 1024),
    "small gate_up": (1024, 4096),
    "small down": (2048, 1024),
}
ROWS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 48, 64, 100, 128, 192, 256, 384, 512, 1000, 1024, 2048, 4096, 8192)
PREFILLS = ((8192,), (2048, 2048, 1024), (17,), (512, 33, 4000))
DECODES = ((1, 8192), (8, 32768), (32, 2048), (128, 2048))
GRAPH_BATCHES = (1, 32, 128)
LIMIT_S = 120.0
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file; what has passed there on the same TPCs is left out")
    parser.add_argument("--control", choices=("smctrl", "green"), default="smctrl")
    parser.add_argument("--levels", type=int, nargs="*", help="default: all that the planner offers")
    parser.add_argument("--child", type=int, metavar="TPCS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(Level(arguments.control, arguments.child).run()))
        return 0
    sets = offered(arguments.control)
    levels = arguments.levels or [int(level) for level in sets]
    done: dict[str, Any] = {}
    if arguments.output and arguments.output.exists():
        done = json.loads(arguments.output.read_text())["levels"]
    for level in levels:
        before, tpcs = done.get(str(level), {}), sets.get(str(level))
        if before.get("passed") and before.get("decode_tpcs") == tpcs:
            continue
        done[str(level)] = result = {**in_a_process(arguments.control, level), "decode_tpcs": tpcs}
        print(f"{level:3d} TPCs: {'passed' if result['passed'] else 'FAILED: ' + result['why']}", flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(report(arguments.control, levels, done), indent=1) + "\n")
    return 0 if all(done[str(level)]["passed"] for level in levels) else 1


def offered(control: str) -> dict[str, list[int] | None]:
    """The levels, those that the self-test lost among them, and their TPCs where these are of our choice.

    They are asked for in a child: this process stays free of CUDA.
    """
    code = f"from bench.sm_levels import planned; planned({control!r})"
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, cwd=ROOT)
    if out.returncode:
        raise SystemExit(out.returncode)
    found: dict[str, list[int] | None] = json.loads(out.stdout.strip().splitlines()[-1])
    return found


def planned(kind: str) -> None:
    found = chosen(kind)
    test, planner = found.reports[kind], getattr(found.control, "planner", None)
    levels = sorted([*test.levels, *test.lost])
    print(json.dumps({level: planner and planner.split(level).decode for level in levels}))


def chosen(kind: str) -> Any:
    from sglang_ext.sm.select import choose

    found = choose(kind)
    if found.control.kind != kind:
        raise SystemExit(f"{kind} cannot be had here: {found.reasons[kind]}")
    return found


def in_a_process(control: str, level: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.sm_levels", "--control", control, "--child", str(level)]
    begin_s = time.perf_counter()
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"passed": False, "why": f"not done after {LIMIT_S:g} s: hung"}
    if out.returncode:
        errors = [line for line in out.stderr.splitlines() if line.strip()]
        return {"passed": False, "why": " / ".join(errors[-5:]) or f"exit code {out.returncode}"}
    result = json.loads(out.stdout.strip().splitlines()[-1])
    result["seconds"] = round(time.perf_counter() - begin_s, 1)
    return result


def report(control: str, levels: list[int], done: dict[str, Any]) -> dict[str, Any]:
    from bench.machine_facts import machine_facts

    return {
        "command": f"python -m bench.sm_levels --control {control}",
        "machine": machine_facts(),
        "offered": levels,
        "levels": done,
    }


class Level:
    """All checks on one split."""

    def __init__(self, control: str, tpcs: int) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(0)
        found = chosen(control)
        if tpcs in (lost := found.reports[control].lost):
            raise SystemExit(f"lost in the start-up self-test: {lost[tpcs]}")
        self.control = found.control  # its streams live as long as it does
        partition = self.control.partition(tpcs)
        self.sides = {"decode": partition.decode, "prefill": partition.prefill}
        self.plain = torch.cuda.Stream()
        self.checks = 0
        self.largest_error = 0.0

    def run(self) -> dict[str, Any]:
        self.gemms()
        self.prefill_attention()
        self.decode_attention()
        step_ms = {str(batch): self.decode_graph(batch) for batch in GRAPH_BATCHES}
        return {
            "passed": True,
            "checks": self.checks,
            "largest_relative_error": self.largest_error,
            "decode_graph_ms": step_ms,
        }

    def randn(self, *shape: int, scale: float = 1.0) -> Any:
        return self.torch.randn(*shape, device="cuda", dtype=self.torch.bfloat16) * scale

    def same(self, what: str, compute: Callable[[], Any], tolerance: float) -> None:
        """Run on an ordinary stream and on both sides; raise unless the results agree and are finite."""
        torch = self.torch
        torch.cuda.synchronize()
        with torch.cuda.stream(self.plain):
            wanted = compute().float()
        torch.cuda.synchronize()
        scale = wanted.abs().max().item()
        for side, stream in self.sides.items():
            with torch.cuda.stream(stream):
                got = compute().float()
            stream.synchronize()
            error = (got - wanted).abs().max().item() / scale
            self.checks += 1
            self.largest_error = max(self.largest_error, error)
            if not error <= tolerance:
                raise SystemExit(f"{what} on {side}'s side differs by {error:.3g} of the largest value")

    def gemms(self) -> None:
        for name, (inputs, outputs) in {**LINEARS, **SMALL_LINEARS}.items():
            weight = self.randn(outputs, inputs, scale=inputs**-0.5)
            for rows in ROWS:
                x = self.randn(rows, inputs)
                self.same(f"{name} with {rows} rows", lambda x=x, w=weight: self.torch.nn.functional.linear(x, w), 0.01)

    def prefill_attention(self) -> None:
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        torch = self.torch
        for lengths in PREFILLS:
            total, most = sum(lengths), max(lengths)
            q = self.randn(total, HEADS, HEAD_DIM)
            k, v = self.randn(total, KV_HEADS, HEAD_DIM), self.randn(total, KV_HEADS, HEAD_DIM)
            ends = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
            self.same(
                f"FA3 prefill of {lengths}",
                lambda q=q, k=k, v=v, ends=ends, most=most: flash_attn_varlen_func(
                    q, k, v, ends, ends, most, most, causal=True
                ),
                0.01,
            )

    def decode_attention(self) -> None:
        for batch, context in DECODES:
            attend = self.attention(batch, context)
            q = self.randn(batch, HEADS, HEAD_DIM)
            self.same(f"FA3 decode of {batch} × {context}", lambda q=q, attend=attend: attend(q), 0.01)

    def attention(self, batch: int, context: int) -> Callable[[Any], Any]:
        """FA3 over a paged KV cache of one-token pages, as SGLang calls it."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        torch = self.torch
        slots = batch * context
        k, v = self.randn(slots, 1, KV_HEADS, HEAD_DIM), self.randn(slots, 1, KV_HEADS, HEAD_DIM)
        pages = torch.randperm(slots, device="cuda", dtype=torch.int64).to(torch.int32).view(batch, context)
        lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda")

        def attend(q: Any) -> Any:
            return flash_attn_with_kvcache(
                q=q,
                k_cache=k,
                v_cache=v,
                page_table=pages,
                cache_seqlens=lengths,
                cu_seqlens_q=ends,
                max_seqlen_q=1,
                causal=True,
            )

        return attend

    def decode_graph(self, batch: int) -> float:
        """36 layers as a CUDA graph on decode's side beside GEMMs on prefill's, against an ordinary stream's graph."""
        torch = self.torch
        linear = torch.nn.functional.linear
        attend = self.attention(batch, 2048)
        weights = [
            {name: self.randn(out, into, scale=into**-0.5) for name, (into, out) in LINEARS.items()} for _ in range(2)
        ]
        norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        x = self.randn(batch, HIDDEN)

        def step() -> Any:
            h = x
            for layer in range(LAYERS):
                w = weights[layer % 2]
                q = linear(torch.nn.functional.rms_norm(h, (HIDDEN,), norm), w["qkv"])[:, : HEADS * HEAD_DIM]
                h = h + linear(attend(q.reshape(batch, HEADS, HEAD_DIM)).reshape(batch, -1), w["o"])
                gate, up = linear(torch.nn.functional.rms_norm(h, (HIDDEN,), norm), w["gate_up"]).chunk(2, dim=-1)
                h = h + linear(torch.nn.functional.silu(gate) * up, w["down"])
            return h

        outputs, graphs = {}, {}
        for name, stream in (("plain", self.plain), ("decode", self.sides["decode"])):
            with torch.cuda.stream(stream):
                step()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                outputs[name] = step()
        with torch.cuda.stream(self.plain):
            graphs["plain"].replay()
        torch.cuda.synchronize()
        big, weight = self.randn(8192, HIDDEN), weights[0]["gate_up"]
        stream, times = self.sides["decode"], []
        for _ in range(10):
            outputs["decode"].zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(self.sides["prefill"]):
                for _ in range(8):
                    linear(big, weight)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(stream):
                begin.record()
                graphs["decode"].replay()
                end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
            wanted = outputs["plain"].float()
            error = (outputs["decode"].float() - wanted).abs().max().item() / wanted.abs().max().item()
            self.checks += 1
            self.largest_error = max(self.largest_error, error)
            if not error <= 0.02:
                raise SystemExit(f"the decode graph of {batch} differs by {error:.3g} of the largest value")
        return round(sorted(times)[len(times) // 2], 3)


if __name__ == "__main__":
    sys.exit(main())
