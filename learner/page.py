"""Reports for people: sections of text, tables and figures, as one self-contained HTML page or as plain text."""

from __future__ import annotations

import base64
import html
import io
import math
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

Cell = str | int | float | None

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2330; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid #d9dee7; padding-bottom: .2rem; }
p { margin: .4rem 0 .8rem; max-width: 48rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #566074; padding-bottom: .3rem; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #e8ebf1; text-align: right; white-space: nowrap; }
th { color: #566074; font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
td.text { text-align: left; white-space: normal; }
figure { margin: 1rem 0 1.4rem; }
figure img { max-width: 100%; height: auto; }
figcaption { color: #566074; max-width: 48rem; }
"""


@dataclass(frozen=True, slots=True)
class Text:
    """One paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under named columns. Numbers are shown with three significant digits, None as a dash."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells under {len(self.columns)} columns")

    def to_text(self) -> str:
        """The table for a terminal: first column flush left, numbers flush right."""
        lines = [[str(name) for name in self.columns], *([shown(cell) for cell in row] for row in self.rows)]
        widths = [max(_width(line[at]) for line in lines) for at in range(len(self.columns))]
        text = []
        for number, line in enumerate(lines):
            cells = [_padded(cell, widths[at], at == 0) for at, cell in enumerate(line)]
            text.append("  ".join(cells).rstrip())
            if number == 0:
                text.append("  ".join("─" * width for width in widths))
        return "\n".join([self.caption, *text] if self.caption else text)


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture in PNG. ``title`` says what it shows, to those who cannot see it too."""

    title: str
    png: bytes
    caption: str = ""

    @classmethod
    def from_plot(cls, title: str, plot: Plot, caption: str = "") -> Figure:
        """Draw a matplotlib figure; it need not have been made through pyplot."""
        data = io.BytesIO()
        plot.savefig(data, format="png", dpi=130, facecolor="white")
        return cls(title, data.getvalue(), caption)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Text | Table | Figure]


def render_html(title: str, sections: Sequence[Section], subtitle: str = "") -> str:
    """Return a page that needs no other file and no network: style and pictures are in it. All text is escaped."""
    body = [f"<h1>{_escaped(title)}</h1>"]
    if subtitle:
        body.append(f"<p>{_escaped(subtitle)}</p>")
    for section in sections:
        body.append(f"<section>\n<h2>{_escaped(section.title)}</h2>")
        body.extend(_block(block) for block in section.blocks)
        body.append("</section>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{_escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def write_html(path: str | os.PathLike[str], title: str, sections: Sequence[Section], subtitle: str = "") -> None:
    """Write :func:`render_html` to a file. Raises OSError."""
    Path(path).write_text(render_html(title, sections, subtitle), encoding="utf-8")


def shown(cell: Cell) -> str:
    """A cell as text: three significant digits, thousands apart, a dash for what is not known."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if math.isinf(cell):
        return "∞" if cell > 0 else "−∞"
    size = abs(cell)
    if size == 0.0:
        return "0"
    if not 1e-4 <= size < 1e9:
        return f"{cell:.2e}"
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3 if size >= 0.09995 else 4
    return f"{cell:,.{decimals}f}"


def _block(block: Text | Table | Figure) -> str:
    if isinstance(block, Text):
        return f"<p>{_escaped(block.text)}</p>"
    if isinstance(block, Table):
        return _table(block)
    picture = base64.b64encode(block.png).decode("ascii")
    caption = f"\n<figcaption>{_escaped(block.caption)}</figcaption>" if block.caption else ""
    title = _escaped(block.title)
    return f'<figure>\n<img alt="{title}" title="{title}" src="data:image/png;base64,{picture}"/>{caption}\n</figure>'


def _table(table: Table) -> str:
    caption = f"<caption>{_escaped(table.caption)}</caption>" if table.caption else ""
    head = "".join(f'<th scope="col">{_escaped(name)}</th>' for name in table.columns)
    rows = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<div class="wide"><table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    )


def _cell(cell: Cell) -> str:
    kind = ' class="text"' if isinstance(cell, str) else ""
    return f"<td{kind}>{_escaped(shown(cell))}</td>"


def _escaped(text: str) -> str:
    # XML, and so every strict parser, has no place for control characters.
    printable = "".join(
        c if c in "\t\n" or not unicodedata.category(c).startswith(("Cc", "Cs")) else "\ufffd" for c in text
    )
    return html.escape(printable)


def _width(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _padded(text: str, width: int, left: bool) -> str:
    gap = " " * (width - _width(text))
    return text + gap if left else gap + text
