"""Ranks in processes of their own, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.server import free_port
from sglang_ext.xp.exchange import LETTER_BYTES, Exchange, RankLostError, _letter, _missing, _word

SIZES = (0, LETTER_BYTES - 200, LETTER_BYTES, 100_000)


@given(st.binary(max_size=3 * LETTER_BYTES))
def test_a_word_is_its_letter_and_the_rest(data: bytes) -> None:
    letter, rest = _letter(data)
    assert len(letter) == LETTER_BYTES
    assert len(rest) == _missing(letter)
    assert _word(letter, rest) == data


def ranks(count: int, work: Callable[[Exchange], Any]) -> list[Any]:
    """What ``work`` returns on each of so many ranks, or the error's text."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    queue = context.SimpleQueue()
    processes = [context.Process(target=_run, args=(rank, count, port, work, queue)) for rank in range(count)]
    for process in processes:
        process.start()
    found = dict(queue.get() for _ in range(count))
    for process in processes:
        process.join(30)
    return [found[rank] for rank in range(count)]


def _run(rank: int, count: int, port: int, work: Callable[[Exchange], Any], queue: Any) -> None:
    torch.set_num_threads(1)
    try:
        queue.put((rank, work(Exchange(rank, count, port, torch.device("cpu")))))
    except Exception as error:
        queue.put((rank, f"{type(error).__name__}: {error}"))


def words(exchange: Exchange) -> tuple[list[list[int]], list[int]]:
    """Sizes of what all say to rank 0, and of what it says to all."""
    gathered = [[len(word) for word in exchange.gather(b"x" * (size + exchange.rank))] for size in SIZES]
    said = [len(exchange.broadcast(b"y" * size if exchange.rank == 0 else None)) for size in SIZES]
    return gathered, said


def rows(exchange: Exchange) -> tuple[list[float], list[float], int, int]:
    """Rank r sends r + 1 rows to every other, two numbers each: its own rank and theirs."""
    rank, count = exchange.rank, exchange.ranks
    mine = torch.tensor([[rank, other] for other in range(count) for _ in range(rank + 1)], dtype=torch.float32)
    out = torch.empty((sum(range(1, count + 1)), 2))
    receives = [other + 1 for other in range(count)]
    exchange.all_to_all(out, mine, receives, [rank + 1] * count)
    late = torch.empty_like(out)
    work = exchange.migrate(late, mine, receives, [rank + 1] * count)
    work.wait()
    return out[:, 0].tolist(), late[:, 1].tolist(), exchange.all_to_all_bytes, exchange.migrated_bytes


def test_words_of_any_size_arrive_whole() -> None:
    found = ranks(3, words)
    assert found[0] == ([[size, size + 1, size + 2] for size in SIZES], list(SIZES))
    assert found[1] == found[2] == ([[]] * len(SIZES), list(SIZES))


def test_rows_go_where_they_belong_and_their_bytes_are_counted() -> None:
    for rank, (senders, receivers, all_to_all, migrated) in enumerate(ranks(3, rows)):
        assert senders == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert receivers == [float(rank)] * 6
        assert all_to_all == migrated == 2 * (rank + 1) * 2 * 4  # to two others, two float32 a row


def dies(exchange: Exchange) -> str:
    if exchange.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    with pytest.raises(RankLostError, match="XP rank 0: another rank is gone"):
        exchange.gather(None)
    return "noticed" if time.monotonic() - begin_s < 20 else "late"


def test_a_rank_that_dies_is_noticed_at_once() -> None:
    context, port = multiprocessing.get_context("spawn"), free_port()
    queue = context.SimpleQueue()
    processes = [context.Process(target=_run, args=(rank, 2, port, dies, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    assert queue.get() == (0, "noticed")
    for process in processes:
        process.join(30)
