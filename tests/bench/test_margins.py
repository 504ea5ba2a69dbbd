from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from bench.margins import TIE, least, margins


def ask(margin_beside: Callable[[int], float], cases) -> list[float | None]:
    """Margins by a server to which token 1 is by so much likelier than token 2, by the requests that run with it."""

    async def asked() -> list[float | None]:
        running = 0

        async def generate(request: web.Request) -> web.Response:
            nonlocal running
            body = await request.json()
            running += 1
            await asyncio.sleep(0.05)
            margin = margin_beside(running - 1)
            running -= 1
            top = [[[-1.0, 1, None], [-1.0 - margin, 2, None]]]
            assert body["sampling_params"]["max_new_tokens"] in (1, 4)
            return web.json_response({"meta_info": {"output_top_logprobs": top}})

        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await margins([[7] * 5] * 100, f"http://127.0.0.1:{port}", cases)
        finally:
            await runner.cleanup()

    return asyncio.run(asked())


PARTED = (0, 1, [5, 1, 9], [5, 2, 9])


def test_a_margin_that_holds_in_any_company_is_no_tie() -> None:
    assert ask(lambda others: 0.5, [PARTED]) == [pytest.approx(0.5)]


def test_the_least_margin_in_any_company_counts() -> None:
    assert ask(lambda others: 0.5 if others < 7 else 0.2, [PARTED, PARTED]) == [pytest.approx(0.2)] * 2


def test_tokens_that_change_places_are_a_tie() -> None:
    assert ask(lambda others: 0.5 if others < 3 else -0.4, [PARTED]) == [0.0]
    assert least([0.5, -0.4]) == 0.0 <= TIE
    assert least([-0.5, -0.4]) == 0.4


def test_answers_of_another_length_or_with_a_token_nobody_expects_have_no_margin() -> None:
    assert ask(lambda others: 0.1, [(0, 2, [5, 1], [5, 1, 9]), (0, 0, [1], [77])]) == [None, None]
