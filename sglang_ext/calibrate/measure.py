"""Measures sets of TPCs on a GPU. Run by ``conflux calibrate`` as a process of its own, since a kernel may hang.

Reads one JSON object, an encoded :class:`Work`, from its standard input, and prints one JSON object per line: first
``{"step": "ready", …}``, then for each set ``{"step": "set", "index", "gemm_s", "read_s", "read_bytes"}`` or
``{"step": "failed", "index", "reason"}``. A set that hangs (``hung``) ends the process: nothing can run after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

HUNG = 3  # exit status
READ_BYTES = 1 << 30
WARM_UP_S = 0.3
BLOCK_THREADS = 256
BLOCKS_PER_SM = 8  # 2048 threads, all that an SM holds
RUNS_PER_TIMING = 4  # so that the gap between event and first launch does not count
PEER_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What a child is to measure: ``sets`` are (index, TPC ids, SMs of a green context), see ``sets.TpcSet``.

    ``shapes``: GEMMs (m, k, n). ``mask_offset``: where a stream keeps its mask, found and verified on this driver and
    GPU by another process; 0 where masks are not used. ``peer``: measure the link to another GPU as well.
    ``timeout_s``: after that a kernel counts as hung.
    """

    ordinal: int
    libcuda: str
    mask_offset: int
    sets: list[tuple[int, list[int], int]]
    shapes: list[tuple[int, int, int]]
    repeats: int
    peer: bool = False
    timeout_s: float = 5.0

    @classmethod
    def decode(cls, text: str) -> Work:
        return cls(**json.loads(text))

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class HungError(Exception):
    """Work on the GPU did not end in its time."""


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def main() -> int:
    work = Work.decode(sys.stdin.read())
    bench = Bench(work)
    say(step="ready", **bench.describe())
    if work.peer:
        say(step="link", **link_bandwidth(work.ordinal))
    bench.warm_up()
    for index, tpcs, green_sms in work.sets:
        try:
            say(step="set", index=index, **bench.measure(tpcs, green_sms))
        except (HungError, TimeoutError) as error:
            say(step="failed", index=index, reason=str(error) or "a kernel did not end", hung=True)
            os._exit(HUNG)  # an orderly end would wait for the kernel
        except (RuntimeError, ValueError) as error:
            say(step="failed", index=index, reason=" ".join(str(error).split())[:300])
    return 0


class Bench:
    """One GPU with matrices and a read buffer on it."""

    def __init__(self, work: Work) -> None:
        import torch

        self._torch = torch
        self._work = work
        self._cuda = torch.device("cuda", work.ordinal)
        torch.cuda.set_device(self._cuda)
        self._operands = {shape: self._matrices(*shape) for shape in map(tuple, work.shapes)}
        self._native = self._open()
        torch.cuda.synchronize()

    def describe(self) -> dict[str, Any]:
        torch = self._torch
        free, total = torch.cuda.mem_get_info(self._cuda)
        held = torch.cuda.memory_reserved(self._cuda)
        return {
            "name": torch.cuda.get_device_name(self._cuda),
            "sms": torch.cuda.get_device_properties(self._cuda).multi_processor_count,
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda or "",
            "used_by_others": max(0, total - free - held - READ_BYTES) / total,
            "reads_by": "a plain kernel" if self._native else "a GEMV",
        }

    def warm_up(self) -> None:
        """Raise the clocks, on all SMs."""
        end = time.monotonic() + WARM_UP_S
        stream = self._torch.cuda.current_stream()
        while time.monotonic() < end:
            for shape in self._operands:
                self._time(stream, lambda shape=shape: self._gemm(shape))

    def measure(self, tpcs: list[int], green_sms: int) -> dict[str, Any]:
        """Timings on one set. Raises RuntimeError if the set does not hold, HungError or TimeoutError if it hangs."""
        if green_sms:
            return self._on_green(green_sms)
        if self._native is None:
            return self._timings(self._torch.cuda.Stream(self._cuda), self._sms)
        handle = self._native.create_stream()
        stream = self._torch.cuda.ExternalStream(handle, device=self._cuda)
        try:
            if not tpcs:
                return self._timings(stream, self._sms)
            with self._masked(handle, tpcs):
                return self._timings(stream, 2 * len(tpcs))
        finally:
            self._native.destroy_stream(handle)

    def _open(self) -> Any:
        try:
            import conflux_native

            if not conflux_native.AVAILABLE:
                return None
        except ImportError:
            return None
        return conflux_native.Device(conflux_native.Driver(self._work.libcuda), self._work.ordinal)

    @property
    def _sms(self) -> int:
        return int(self._torch.cuda.get_device_properties(self._cuda).multi_processor_count)

    @contextlib.contextmanager
    def _masked(self, handle: int, tpcs: list[int]) -> Iterator[None]:
        """Set and check the stream's mask: the kernels timed under it must run there and nowhere else."""
        import conflux_native
        from conflux_native.topology import sms_of
        from conflux_native.verify import observed

        slot = conflux_native.MaskSlot(self._work.mask_offset)
        before = slot.raw(handle)
        slot.apply(handle, conflux_native.Mask(tpcs))
        try:
            wanted = sms_of(tpcs)
            seen = observed(self._native, handle, wanted, self._work.timeout_s)
            if seen != wanted:
                raise RuntimeError(f"the mask does not hold: blocks ran on {len(seen)} SMs, {len(wanted)} were set")
            yield
        finally:
            # The driver may use a stream's memory again.
            slot.restore(handle, before)

    def _on_green(self, sms: int) -> dict[str, Any]:
        import conflux_native

        partition = conflux_native.GreenPartition(self._native, sms)
        try:
            got = partition.sm_counts[0]
            if got != sms:
                raise RuntimeError(f"a green context of {sms} SMs came out as {got}")
            stream = self._torch.cuda.ExternalStream(partition.create_stream(0), device=self._cuda)
            return self._timings(stream, sms)
        finally:
            partition.destroy()

    def _timings(self, stream: Any, sms: int) -> dict[str, Any]:
        repeats = self._work.repeats
        gemm_s = []
        for shape in self._operands:
            self._time(stream, lambda shape=shape: self._gemm(shape))  # warm: cuBLAS chooses and allocates
            gemm_s.append([self._time(stream, lambda shape=shape: self._gemm(shape)) for _ in range(repeats)])
        return {"gemm_s": gemm_s, "read_s": self._reads(stream, sms, repeats), "read_bytes": READ_BYTES}

    def _reads(self, stream: Any, sms: int, repeats: int) -> list[float]:
        if self._native is None:
            matrix, vector = self._gemv
            read = self._torch.nn.functional.linear
            return [self._time(stream, lambda: read(vector, matrix)) for _ in range(repeats + 1)][1:]
        handle, blocks = stream.cuda_stream, sms * BLOCKS_PER_SM

        def read_all() -> None:
            self._native.launch_read(handle, READ_BYTES, RUNS_PER_TIMING, blocks, BLOCK_THREADS)

        taken_ms = [self._native.elapsed_ms(handle, read_all, self._work.timeout_s) for _ in range(repeats + 1)][1:]
        return [1e-3 * each / RUNS_PER_TIMING for each in taken_ms]

    @functools.cached_property
    def _gemv(self) -> tuple[Any, Any]:
        torch, columns = self._torch, 2048
        rows = READ_BYTES // (2 * columns)
        kind = {"dtype": torch.bfloat16, "device": self._cuda}
        return torch.ones(rows, columns, **kind), torch.ones(1, columns, **kind)

    def _matrices(self, m: int, k: int, n: int) -> tuple[Any, Any, Any]:
        kind = {"dtype": self._torch.bfloat16, "device": self._cuda}
        randn = self._torch.randn
        return randn(m, k, **kind), randn(n, k, **kind).t(), self._torch.empty(m, n, **kind)

    def _gemm(self, shape: tuple[int, int, int]) -> None:
        a, b, out = self._operands[shape]
        self._torch.mm(a, b, out=out)

    def _time(self, stream: Any, work: Callable[[], Any]) -> float:
        """Seconds of one of the runs of ``work`` between two events. Raises HungError."""
        torch = self._torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begin.record(stream)
            for _ in range(RUNS_PER_TIMING):
                work()
            end.record(stream)
        deadline = time.monotonic() + self._work.timeout_s
        while not end.query():
            if time.monotonic() > deadline:
                raise HungError(f"a GEMM did not end within {self._work.timeout_s:g} s")
        return 1e-3 * float(begin.elapsed_time(end)) / RUNS_PER_TIMING


def link_bandwidth(ordinal: int) -> dict[str, Any]:
    """Bytes/s of a copy from GPU ``ordinal`` to the next visible one, median of several after a warm-up."""
    import torch

    if torch.cuda.device_count() < 2:
        return {"bytes_per_s": 0.0, "method": "one GPU is visible"}
    peer = (ordinal + 1) % torch.cuda.device_count()
    source = torch.ones(PEER_BYTES, dtype=torch.uint8, device=f"cuda:{ordinal}")
    target = torch.empty_like(source, device=f"cuda:{peer}")
    taken = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        taken.append(1e-3 * begin.elapsed_time(end))
    direct = torch.cuda.can_device_access_peer(ordinal, peer)
    way = "directly" if direct else "through the host's memory"
    return {
        "bytes_per_s": PEER_BYTES / sorted(taken[1:])[3],
        "method": f"copy of {PEER_BYTES >> 20} MiB from GPU {ordinal} to GPU {peer}, {way}",
    }


if __name__ == "__main__":
    raise SystemExit(main())
