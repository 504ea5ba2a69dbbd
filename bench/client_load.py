"""How late the load client is by itself (``python -m bench.client_load``).

A stub in a process of its own answers as SGLang streams, ``--rate`` tokens a second on each of ``--streams``
connections, and notes when it writes each. The client is the one of all benchmarks; a token's lateness is from then
until it has been read. Needs no GPU and no model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.client import replay
from bench.machine_facts import machine_facts
from bench.plan import PlannedRequest

RAMP_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=5.0, help="tokens a second of each stream (default: 5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each stream lasts (default: 20)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    figures = measure(given.streams, given.rate, given.seconds)
    figures |= {"command": "python -m bench.client_load", "machine": machine_facts()}
    print(json.dumps(figures))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(figures["failed"] > 0)


def measure(streams: int, rate: float, seconds: float) -> dict[str, Any]:
    """Figures of one run. Raises RuntimeError if the stub does not come up."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stub = context.Process(target=_serve, args=(theirs, 1.0 / rate), daemon=True)
    stub.start()
    theirs.close()  # so that the end of the stub is seen
    try:
        if not ours.poll(30.0):
            raise RuntimeError("the stub did not come up within 30 s")
        port = ours.recv()
        tokens = max(2, round(rate * seconds))
        plan = [
            PlannedRequest(RAMP_S * index / streams, [index], tokens, {"stream": index}) for index in range(streams)
        ]
        loaded = uvloop.run(replay(f"http://127.0.0.1:{port}", plan, progress="streams"))
        ours.send(None)
        written_s: dict[int, list[float]] = ours.recv()
    finally:
        stub.terminate()
        stub.join()
    late_ms, stub_late_ms = [], []
    for request in loaded.requests:
        sent_s = np.array(written_s.get(request.index, []))
        read_s = np.array(request.event_s) + loaded.start_s
        if len(read_s) == len(sent_s) and len(sent_s):
            # Before all streams run there is less to do.
            steady = sent_s > loaded.start_s + RAMP_S
            late_ms.append(1e3 * (read_s - sent_s)[steady])
            due_s = sent_s[0] + np.arange(len(sent_s)) / rate
            stub_late_ms.append(1e3 * (sent_s - due_s)[steady])
    late, stub_late = (np.concatenate(each) if each else np.zeros(1) for each in (late_ms, stub_late_ms))
    return {
        "streams": streams,
        "tokens_per_s": round(streams * rate, 1),
        "tokens_measured": int(late.size),
        "failed": sum(not request.ok for request in loaded.requests),
        **{f"{name}_lateness_ms": round(float(np.quantile(late, q)), 3) for name, q in _QUANTILES.items()},
        "p99_stub_lateness_ms": round(float(np.quantile(stub_late, 0.99)), 3),
    }


_QUANTILES = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}


def _serve(pipe: Connection, every_s: float) -> None:
    uvloop.run(_stub(pipe, every_s))


async def _stub(pipe: Connection, every_s: float) -> None:
    """Serve until told to stop, then send the times (time.perf_counter()) of every stream's writes."""
    written_s: dict[int, list[float]] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Stream(written_s, every_s), "127.0.0.1", 0, backlog=4096)
    pipe.send(server.sockets[0].getsockname()[1])
    stopped = asyncio.Event()
    loop.add_reader(pipe.fileno(), stopped.set)
    await stopped.wait()
    loop.remove_reader(pipe.fileno())
    os.set_blocking(pipe.fileno(), True)
    pipe.recv()
    pipe.send(written_s)


class _Stream(asyncio.Protocol):
    """One connection: takes one request and answers with its tokens, one chunk of one event each."""

    def __init__(self, written_s: dict[int, list[float]], every_s: float) -> None:
        self._written_s, self._every_s = written_s, every_s
        self._taken = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._taken += data
        _, found, body = self._taken.partition(b"\r\n\r\n")
        if not found:
            return
        try:
            sampling = json.loads(body)["sampling_params"]
        except ValueError:
            return  # there is more to come
        self._taken = b""
        self._times = self._written_s.setdefault(sampling["custom_params"]["stream"], [])
        self._left = self._tokens = sampling["max_new_tokens"]
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\n" + kind)
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time() + self._every_s
        self._loop.call_at(self._due_s, self._write)

    def _write(self) -> None:
        if self._transport.is_closing():
            return
        self._left -= 1
        finish = '{"type": "length"}' if not self._left else "null"
        meta = f'{{"finish_reason": {finish}, "completion_tokens": {self._tokens - self._left}}}'
        event = f'data: {{"text": "", "output_ids": [17], "meta_info": {meta}}}\n\n'.encode()
        end = b"" if self._left else b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        self._times.append(time.perf_counter())
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, end))
        if self._left:
            self._due_s += self._every_s
            self._loop.call_at(self._due_s, self._write)


if __name__ == "__main__":
    sys.exit(main())
