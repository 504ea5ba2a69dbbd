"""A server that streams /generate as SGLang does, at times that a test dictates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """How one request is answered: pauses (s) before each event, and how many tokens each carries."""

    pauses_s: list[float]
    tokens: list[int]
    status: int = 200
    finish: Any = field(default_factory=lambda: {"type": "length"})
    error: str | None = None
    cut_off: bool = False


@asynccontextmanager
async def stub_server(script: Callable[[dict[str, Any]], Script]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the URL and the list of bodies received so far."""
    bodies: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        plan = script(body)
        if plan.status != 200:
            return web.json_response({"error": "no"}, status=plan.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        done = 0
        for i, (pause_s, tokens) in enumerate(zip(plan.pauses_s, plan.tokens, strict=True)):
            await asyncio.sleep(pause_s)
            done += tokens
            last = i == len(plan.tokens) - 1
            meta = {"finish_reason": plan.finish if last else None, "completion_tokens": done}
            # A text that quotes the counter's name must not be taken for it.
            event = {"text": 'x "completion_tokens": 99', "output_ids": list(range(done)), "meta_info": meta}
            payload = f"data: {json.dumps(event)}\n\n".encode()
            # Events may be split anywhere on their way.
            await response.write(payload[:7])
            await response.write(payload[7:])
        if plan.error:
            await response.write(f"data: {json.dumps({'error': {'message': plan.error}})}\n\n".encode())
        if plan.cut_off:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}", bodies
    finally:
        await runner.cleanup()
