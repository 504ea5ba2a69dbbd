from __future__ import annotations

import base64
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import matplotlib.image
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.page import Figure, Section, Table, Text, render_html, shown
from learner.plots import gap_distribution, new_plot
from learner.replay import ReplayReport, Steps, replay
from learner.report import gap_figures, gap_section, replay_html, replay_json, replay_text
from tests.learner.generated import header
from tests.learner.workload import workload

VOID = {"meta", "img", "br", "hr", "link", "input"}
PNG = b"\x89PNG\r\n\x1a\n"


class Nesting(HTMLParser):
    """Fails on an element that is closed in the wrong place or never; collects pictures and foreign references."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[bytes] = []
        self.alternatives: list[str] = []
        self.references: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        source = values.get("src") or values.get("href")
        if tag == "img":
            assert source is not None
            kind, data = source.split(",", 1)
            assert kind == "data:image/png;base64"
            self.pictures.append(base64.b64decode(data, validate=True))
            self.alternatives.append(values["alt"] or "")
        elif source is not None:
            self.references.append(source)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def replayed() -> tuple[ReplayReport, Steps]:
    return replay(header(), [*workload(120), *workload(60, first=120, version=3)])


@pytest.fixture(scope="module")
def page(replayed: tuple[ReplayReport, Steps]) -> str:
    return replay_html(*replayed, "/somewhere/record.jsonl", {"conflux": [0.01, 0.02, 0.5]})


def test_page_is_well_formed_and_self_contained(page: str) -> None:
    assert page.startswith("<!DOCTYPE html>")
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    parsed = Nesting(page)
    assert parsed.references == []
    assert "<script" not in page


def test_page_has_its_figures(page: str) -> None:
    parsed = Nesting(page)
    assert parsed.alternatives == [
        "Error over time",
        "Predicted against measured step times",
        "Distribution of the error",
        "Time between tokens",
    ]
    for picture in parsed.pictures:
        assert picture.startswith(PNG)
        assert len(picture) > 5_000


def test_page_says_what_it_should(page: str, replayed: tuple[ReplayReport, Steps]) -> None:
    text = re.sub(r"<[^>]+>", " ", page)
    for word in (
        "Provenance",
        "tiny",
        "TBT 100 ms",
        "persistence",
        "prefill",
        "temporal",
        "record.jsonl",
        "second half",
    ):
        assert word in text
    assert "/somewhere/" not in text
    assert shown(replayed[0].second_half.by_predictor["learner"].mape_pct) in text


def test_without_gaps_there_is_no_gap_section() -> None:
    assert gap_section({}) is None
    assert gap_section({"none": []}) is None
    section = gap_section({"none": [], "some": [0.1, 0.3]})
    assert section is not None
    [table] = [block for block in section.blocks if isinstance(block, Table)]
    assert [row[:3] for row in table.rows] == [("some", 2, pytest.approx(200.0))]


def test_figures_show_the_data(tmp_path: object) -> None:
    """Two different sets of gaps give two different pictures; the same set gives the same one."""

    def picture(gaps: list[float]) -> np.ndarray:
        import io

        return matplotlib.image.imread(io.BytesIO(gap_distribution({"a": gaps}, 0.1).png))

    one, same, other = picture([0.01, 0.05]), picture([0.01, 0.05]), picture([0.01, 3.0])
    assert one.shape[0] > 200
    assert np.array_equal(one, same)
    assert one.shape != other.shape or not np.array_equal(one, other)


def test_json_is_plain_and_complete(replayed: tuple[ReplayReport, Steps]) -> None:
    report, _ = replayed
    figures = replay_json(report, "record.jsonl", {"conflux": [0.01, 0.02, 0.5]})
    again = msgspec.json.decode(msgspec.json.encode(figures))
    assert again["schema"] == 1
    assert again["total"]["by_predictor"]["learner"]["steps"] == report.judged_steps
    assert set(again["total"]["by_predictor"]) == {"learner", "roofline", "persistence", "live"}
    assert [phase["name"] for phase in again["phases"]]
    assert again["gaps"]["conflux"]["max_itl_ms"] == pytest.approx(500.0)
    assert again["live_learnt"]["steps"] > 0


def test_gap_figures() -> None:
    found = gap_figures(np.arange(1, 102) / 1000)
    assert found == pytest.approx(
        {"mean_itl_ms": 51.0, "median_itl_ms": 51.0, "p90_itl_ms": 91.0, "p99_itl_ms": 100.0, "max_itl_ms": 101.0}
    )
    assert gap_figures([]) == {}


def test_terminal_text_is_aligned(replayed: tuple[ReplayReport, Steps]) -> None:
    tables = [block.splitlines() for block in replay_text(replayed[0]).split("\n\n")[1:]]
    assert len(tables) == 2
    for lines in tables:
        [at] = [number for number, line in enumerate(lines) if line.startswith("─")]
        rule, rows = lines[at], lines[at + 1 :]
        assert len(rows) >= 4
        ends = [match.end() for match in re.finditer("─+", rule)]
        for row in rows:
            assert len(row) <= ends[-1] <= 120
            assert row[ends[0] : ends[0] + 2].strip() == ""


cells = st.one_of(st.text(max_size=20), st.integers(-(10**12), 10**12), st.floats(), st.none(), st.booleans())


@given(
    title=st.text(max_size=30),
    rows=st.lists(st.tuples(cells, cells), max_size=4),
    texts=st.lists(st.text(max_size=40), max_size=3),
)
def test_any_text_is_escaped(title: str, rows: list[tuple[object, object]], texts: list[str]) -> None:
    table = Table((title, "b"), rows, caption=title)  # type: ignore[arg-type]
    figure = Figure(title or "x", PNG, caption=title)
    page = render_html(title, [Section(title, [*map(Text, texts), table, figure])], subtitle=title)
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    Nesting(page)
    assert all(line == line.rstrip() or "\n" in title for line in table.to_text().split("\n") if not title)


def test_markup_in_names_stays_text() -> None:
    page = render_html("<script>alert(1)</script>", [Section("a & b", [Table(("<b>",), [('"quoted"',)])])])
    assert "<script" not in page
    assert "<b>" not in page
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    assert [element.text for element in root.iter("h1")] == ["<script>alert(1)</script>"]
    assert [element.text for element in root.iter("td")] == ['"quoted"']


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (1234567, "1,234,567"),
        (1234.567, "1,235"),
        (99.97, "100"),
        (12.345, "12.3"),
        (1.2345, "1.23"),
        (0.12345, "0.123"),
        (0.012345, "0.0123"),
        (1.2e-7, "1.20e-07"),
        (0.0, "0"),
        (True, "yes"),
        ("plain", "plain"),
    ],
)
def test_cells(cell: str | int | float | None, text: str) -> None:
    assert shown(cell) == text


def test_ragged_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="1 cells under 2"):
        Table(("a", "b"), [("x",)])


def test_own_plots_use_the_same_style() -> None:
    plot, axes = new_plot(columns=2)
    axes[0].plot([1, 2], [3, 4])
    assert Figure.from_plot("mine", plot).png.startswith(PNG)
