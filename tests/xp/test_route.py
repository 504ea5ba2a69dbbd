"""All ranks' routes together, with rows that know where they come from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.xp.route import Cut, Part, route

Row = tuple[int, int]  # chunk, token


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[Cut]]:
    ranks = draw(st.integers(1, 4))
    pieces = st.tuples(*[st.integers(0, 5)] * ranks)
    cuts = st.builds(Cut, st.integers(0, 50), pieces, st.integers(0, ranks - 1))
    return ranks, draw(st.lists(cuts, max_size=5))


def rows_of(parts: list[Part]) -> list[Row]:
    return [(part.chunk, token) for part in parts for token in range(part.start, part.end)]


@given(batches())
def test_every_rank_sees_all_tokens_in_order_and_sends_them_back(batch: tuple[int, list[Cut]]) -> None:
    ranks, cuts = batch
    routes = [route(cuts, rank, ranks) for rank in range(ranks)]
    own = [rows_of(one.own) for one in routes]
    everything = [(index, cut.start + at) for index, cut in enumerate(cuts) for at in range(cut.tokens)]
    assert sorted(row for rows in own for row in rows) == everything
    arrived = [row for rows in own for row in rows]
    for one in routes:
        assert one.piece_of == [len(each) for each in own]
        in_order = [arrived[at] for at in one.order]
        assert in_order == everything
        assert [in_order[at] for at in one.back] == arrived


@given(batches())
def test_what_migrates_arrives_where_its_prompt_decodes(batch: tuple[int, list[Cut]]) -> None:
    ranks, cuts = batch
    routes = [route(cuts, rank, ranks) for rank in range(ranks)]
    sent: list[list[list[Row]]] = []
    for one in routes:
        rows = iter([rows_of(one.own)[at] for at in one.leaving])
        sent.append([[next(rows) for _ in range(count)] for count in one.leaving_to])
        assert next(rows, None) is None
    for rank, one in enumerate(routes):
        came = [sent[other][rank] for other in range(ranks)]
        assert [len(rows) for rows in came] == one.arriving_from
        assert [row for rows in came for row in rows] == rows_of(one.arriving)
        kept = [rows_of(one.own)[at] for at in one.staying]
        assert kept == rows_of(one.staying_parts)
        owned = [(index, cut.start + at) for index, cut in enumerate(cuts) if cut.owner == rank
                 for at in range(cut.tokens)]  # fmt: skip
        assert sorted(kept + rows_of(one.arriving)) == owned
        for index, cut in enumerate(cuts):
            if cut.owner == rank and cut.pieces[rank]:
                assert (index, cut.start + cut.tokens - 1) in kept  # the row that gives the first token
