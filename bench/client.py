"""Asynchronous load client: sends a plan to POST /generate at its planned times and keeps raw event times.

The load is open: a request is sent when its time has come, however many others are still running. The client parses
as little as it can while tokens stream in, since it shares the machine with the server.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvloop

from bench.plan import PlannedRequest
from sglang_ext.served import LoadResult, RequestResult

if TYPE_CHECKING:
    import aiohttp

COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
LAG_PROBE_S = 0.02


def run_load(
    url: str,
    plan: Sequence[PlannedRequest],
    *,
    deadline_s: float | None = None,
    progress: str | None = None,
) -> LoadResult:
    """Replay ``plan`` against the server at ``url`` and return when every request has ended.

    ``deadline_s``: requests still running then (seconds after the start) are given up and count as failed.
    ``progress``: the label of a progress bar over requests; None: no bar.
    """
    return uvloop.run(replay(url, plan, deadline_s=deadline_s, progress=progress))


async def replay(
    url: str,
    plan: Sequence[PlannedRequest],
    *,
    deadline_s: float | None = None,
    progress: str | None = None,
) -> LoadResult:
    """:func:`run_load` inside a running event loop."""
    import aiohttp
    from tqdm import tqdm

    bodies = [json.dumps(request.body()).encode() for request in plan]  # none of this while requests are running
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    lag = _LagProbe()
    interval_s = 0.2 if sys.stdout.isatty() else 10.0
    bar = tqdm(
        total=len(plan), desc=progress, unit="req", disable=progress is None, file=sys.stdout, mininterval=interval_s
    )
    with bar:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            probe = asyncio.create_task(lag.run())
            start = time.perf_counter()
            calls = [_Call(f"{url}/generate", session, index, plan[index], start) for index in range(len(plan))]
            tasks = [asyncio.create_task(call.run(body)) for call, body in zip(calls, bodies, strict=True)]
            for task in tasks:
                task.add_done_callback(lambda task: task.cancelled() or bar.update())
            try:
                if tasks:
                    await asyncio.wait(tasks, timeout=deadline_s)
                duration_s = time.perf_counter() - start
            finally:
                for task in [*tasks, probe]:
                    task.cancel()
                await asyncio.gather(*tasks, probe, return_exceptions=True)
    return LoadResult([call.result() for call in calls], duration_s, lag.worst_s, start)


class _Call:
    """One request in flight; :meth:`result` is valid at any time, also after cancellation."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, index: int, request: PlannedRequest, start: float
    ) -> None:
        self.url = url
        self.session = session
        self.index = index
        self.request = request
        self.start = start
        self.sent_s: float | None = None
        self.end_s: float | None = None
        self.event_s: list[float] = []
        self.event_tokens: list[int] = []
        self.error: str | None = "given up at the deadline"

    async def run(self, body: bytes) -> None:
        await asyncio.sleep(self.request.arrival_s - self._now())
        self.sent_s = self._now()
        try:
            self.error = await self._stream(body)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever went wrong is this request's result
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.end_s = self._now()

    async def _stream(self, body: bytes) -> str | None:
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url, data=body, headers=headers) as response:
            if response.status != 200:
                return f"HTTP {response.status}: {(await response.text())[:200]}"
            rest = b""
            last = b""
            async for chunk in response.content.iter_any():
                at_s = self._now()
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        last = line[len(b"data: ") :]
                        if complaint := self._record(at_s, last):
                            return complaint
        return self._verdict(last)

    def _record(self, at_s: float, data: bytes) -> str | None:
        """Note the tokens of one event; returns the server's complaint if it is one."""
        match = COMPLETION_TOKENS.search(data)
        if match is None:
            return f"the server answered {data[:200].decode(errors='replace')}"
        tokens = int(match[1])
        if tokens > (self.event_tokens[-1] if self.event_tokens else 0):
            self.event_s.append(at_s)
            self.event_tokens.append(tokens)
        return None

    def _verdict(self, last: bytes) -> str | None:
        try:
            reason = json.loads(last)["meta_info"]["finish_reason"]
        except (ValueError, KeyError, TypeError):
            return "the stream ended without a last event"
        if not isinstance(reason, dict) or reason.get("type") not in ("length", "stop"):
            return f"the request ended with finish reason {reason}"
        got = self.event_tokens[-1] if self.event_tokens else 0
        if got < self.request.output_tokens:
            return f"{got} of {self.request.output_tokens} tokens came"
        return None

    def result(self) -> RequestResult:
        now_s = self._now()
        return RequestResult(
            index=self.index,
            scheduled_s=self.request.arrival_s,
            sent_s=self.request.arrival_s if self.sent_s is None else self.sent_s,
            end_s=now_s if self.end_s is None else self.end_s,
            input_tokens=len(self.request.input_ids),
            requested_tokens=self.request.output_tokens,
            event_s=self.event_s,
            event_tokens=self.event_tokens,
            error=self.error,
        )

    def _now(self) -> float:
        return time.perf_counter() - self.start


class _LagProbe:
    """Measures how late the event loop wakes a sleeper: the client's own error in every event time."""

    worst_s = 0.0

    async def run(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_PROBE_S)
            self.worst_s = max(self.worst_s, time.perf_counter() - before - LAG_PROBE_S)
