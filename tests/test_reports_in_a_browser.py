"""The reports of ``conflux replay``, opened in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.record_file import RecordWriter
from sglang_ext.cli import main
from tests.browser import BROWSER, look
from tests.learner.generated import header
from tests.learner.workload import workload

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium; make test installs one where it may")

TRACE = Path(__file__).resolve().parent.parent / "bench" / "data" / "azure_code_sample.csv"


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "record.jsonl"
    with RecordWriter(path, header()) as writer:
        for iteration in workload(200):
            writer.write(iteration)
    return path


def of_record(record: Path) -> tuple[str, ...]:
    return ("replay", str(record))


def of_trace(record: Path) -> tuple[str, ...]:
    return ("replay", "--trace", str(TRACE), "--record", str(record), "--tbt-slo-ms", "50")


@pytest.mark.parametrize(
    ("command", "headings"),
    [
        (of_record, ("Accuracy", "Over time", "Predicted and measured", "By phase and mode", "Provenance")),
        (of_trace, ("Systems", "Time to first token", "Time between tokens", "Who had the SMs")),
    ],
)
def test_a_report_shows_all_it_has_at_any_width(record, tmp_path, command, headings) -> None:
    html = tmp_path / "report.html"
    assert main([*command(record), "--html", str(html)]) == 0
    page = html.read_text()
    for width in (1280, 600):
        seen = look(page, tmp_path, width)
        assert seen["width"] <= width
        assert seen["scrolls"] <= seen["width"]  # what is too wide scrolls by itself
        shown = " | ".join(seen["headings"])
        assert all(heading in shown for heading in headings), shown
        assert seen["pictures"]
        for picture in seen["pictures"]:
            assert picture["loaded"]
            assert picture["alt"]
            assert 300 < picture["wide"] <= width
            assert picture["high"] > 100
        assert seen["tables"]
        assert all(table["rows"] > 1 and table["high"] > 20 for table in seen["tables"])
        assert seen["asked"] == []  # nothing from elsewhere
