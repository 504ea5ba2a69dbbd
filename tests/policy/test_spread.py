from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.spread import (
    ROWS_APIECE,
    Chunk,
    RankLoad,
    Waiting,
    as_one_request,
    cut,
    piece_order,
    place,
    shard_slots,
    spread,
    times,
)
from tests.policy.analytic import Analytic

MODEL = Analytic()


def load(*context: int, free: int = 10_000, slots: int = 10_000) -> RankLoad:
    return RankLoad(np.array(context, dtype=np.int64), free, slots)


@st.composite
def prompts(draw: st.DrawFn, ranks: int) -> list[Waiting]:
    found = []
    for _ in range(draw(st.integers(0, 5))):
        tokens = draw(st.integers(1, 300))
        found.append(Waiting(tokens, draw(st.integers(0, tokens - 1)), draw(st.integers(0, ranks - 1))))
    return found


@given(st.data(), st.integers(1, 5))
def test_chunks_take_all_shares_in_order_and_every_rank_has_its_rows(data: st.DataObject, ranks: int) -> None:
    waiting = data.draw(prompts(ranks))
    left = sum(prompt.tokens - prompt.done for prompt in waiting)
    shares = np.array(data.draw(st.lists(st.integers(0, 200), min_size=ranks, max_size=ranks)), dtype=np.int64)
    if not 0 < shares.sum() <= left:
        return
    chunks = cut(waiting, shares)
    spared = shares.sum() - sum(sum(chunk.pieces) for chunk in chunks)
    if spared:
        following = waiting[len(chunks)]
        assert spared < ROWS_APIECE * ranks
        assert spared < following.tokens
        assert not following.done
    assert [chunk.prompt for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        prompt, count = waiting[chunk.prompt], sum(chunk.pieces)
        assert chunk.start == prompt.done
        assert chunk.end <= prompt.tokens
        assert min(chunk.pieces) >= 0
        if chunk.prompt < len(chunks) - 1:
            assert chunk.end == prompt.tokens
        if chunk.end == prompt.tokens:
            assert chunk.pieces[prompt.owner] >= 1
        if count >= ROWS_APIECE * ranks:
            assert min(chunk.pieces) >= 1
    # Rounding and the least rows move a few tokens at each chunk.
    given_to = np.sum([chunk.pieces for chunk in chunks], axis=0)
    assert np.abs(given_to - shares).max() <= (ranks + 1) * len(chunks) + spared


@given(st.data(), st.integers(2, 4))
def test_every_rank_has_rows_at_every_long_prompt(data: st.DataObject, ranks: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    done, rows = [0] * len(lengths), np.zeros((len(lengths), ranks), dtype=np.int64)
    while done != lengths:
        left = [at for at, tokens in enumerate(lengths) if done[at] < tokens]
        waiting = [Waiting(lengths[at], done[at], at % ranks) for at in left]
        budget = data.draw(st.integers(ROWS_APIECE * ranks, 80))
        for chunk in spread(waiting, [load()] * ranks, MODEL, tbt_slo_s=0.1, budget=budget, least=ROWS_APIECE * ranks):
            rows[left[chunk.prompt]] += chunk.pieces
            done[left[chunk.prompt]] = chunk.end
    for tokens, of in zip(lengths, rows, strict=True):
        assert of.sum() == tokens
        if tokens > ROWS_APIECE * ranks:
            assert of.min() >= 1


@given(st.data(), st.integers(2, 4), st.floats(0.005, 0.5), st.integers(1, 600))
def test_no_rank_breaks_the_target_unless_nothing_else_is_possible(
    data: st.DataObject, ranks: int, tbt_slo_s: float, budget: int
) -> None:
    waiting = data.draw(prompts(ranks))
    contexts = st.lists(st.integers(1, 4000), max_size=4)
    loads = [load(*data.draw(contexts)) for _ in range(ranks)]
    chunks = spread(waiting, loads, MODEL, tbt_slo_s=tbt_slo_s, budget=budget, least=ranks)
    taken = sum(sum(chunk.pieces) for chunk in chunks)
    left = sum(prompt.tokens - prompt.done for prompt in waiting)
    assert taken <= min(left, budget)
    assert (taken > 0) == (left > 0)
    decoding = any(len(rank.decode_context) for rank in loads)
    if not decoding:
        assert taken > min(left, budget) - ROWS_APIECE * ranks
    elif taken > ranks:
        shares = np.sum([chunk.pieces for chunk in chunks], axis=0)
        slack = (ranks + 1) * len(chunks)
        for rank, one in enumerate(loads):
            _, upper_s, _ = times(MODEL, [one], waiting[0].done, max(int(shares[rank]) - slack, 1))
            assert upper_s[0, -1] <= tbt_slo_s * (1 + 1e-6)


def test_a_rank_with_many_decodes_gets_the_smaller_piece() -> None:
    loads = [load(*[4000] * 16), load()]
    (chunk,) = spread([Waiting(2000, 0, 0)], loads, MODEL, tbt_slo_s=10.0, budget=2000, least=2)
    assert 1 <= chunk.pieces[0] < chunk.pieces[1]


def test_even_ranks_share_evenly() -> None:
    (chunk,) = spread([Waiting(1000, 0, 1)], [load(), load()], MODEL, tbt_slo_s=0.1, budget=1000, least=2)
    assert chunk == Chunk(0, 0, (500, 500))
    assert chunk.end == 1000


def test_the_owners_piece_is_the_last() -> None:
    assert piece_order(1, 4) == [0, 2, 3, 1]


@pytest.mark.parametrize(("tokens", "ranks", "slots"), [(0, 2, 0), (1, 2, 1), (4, 2, 2), (5, 4, 2)])
def test_a_sharded_token_takes_a_part_of_a_slot(tokens: int, ranks: int, slots: int) -> None:
    assert shard_slots(tokens, ranks) == slots


def test_a_decode_is_placed_where_the_least_context_is_and_all_have_room_for_the_shards() -> None:
    assert place(100, 50, [load(500), load(20)]) == 1
    # 100 + 50 + its own shard of 50 slots.
    assert place(100, 50, [load(500), load(20, free=199)]) == 0
    assert place(100, 50, [load(500, free=200), load(20, free=49)]) is None
    assert place(100, 50, [load(500, free=199), load(20, free=199)]) is None


@given(st.integers(0, 4000), st.integers(1, 4000), st.integers(1, 4))
def test_an_even_piece_counts_as_as_many_pairs_as_a_part_of_the_heads_sees(start: int, piece: int, ranks: int) -> None:
    tokens = piece * ranks
    cached = as_one_request(start, tokens, piece, ranks)
    assert piece * (cached + piece) == pytest.approx(tokens * (start + tokens) / ranks, abs=piece)
    assert as_one_request(start, tokens, 0, ranks) == 0
    assert as_one_request(start, 4000, 1, 4) <= start + 4000
