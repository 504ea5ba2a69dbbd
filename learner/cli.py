"""Command-line functions of the learner: they take arguments, print, and return an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from learner.record_file import RecordFileError, RecordReader
from learner.replay import ReplayError, ReplayReport, Steps
from learner.replay import replay as run_replay
from learner.report import replay_html, replay_json, replay_text, write_json

USAGE_ERROR = 2


def replay_parser() -> argparse.ArgumentParser:
    """The options of ``conflux replay``."""
    options = argparse.ArgumentParser(
        prog="conflux replay",
        description="Run recorded timings through a fresh learner, in order, and report how well it predicts.",
        epilog="To serve a request trace on simulated time: conflux replay --trace FILE (see its --help).",
        allow_abbrev=False,
    )
    options.add_argument("record", metavar="RECORD", help="a record file (--conflux-record); .gz is unpacked")
    options.add_argument("--html", type=Path, metavar="PATH", help="write the report as one HTML page")
    options.add_argument("--json", type=Path, metavar="PATH", help="write the figures as JSON")
    options.add_argument("--quiet", action="store_true", help="no progress bar")
    return options


def replay(argv: Sequence[str] | None = None) -> int:
    """``conflux replay RECORD``: print and write the accuracy of a learner on a record. Returns 0, or 2 on an error."""
    options = replay_parser().parse_args(argv)
    try:
        for path in (options.html, options.json):
            if path is not None and not path.parent.is_dir():
                raise FileNotFoundError(f"{path}: there is no directory {path.parent}")
        report, steps, truncated = _replayed(options.record, quiet=options.quiet)
        print(replay_text(report))
        if truncated:
            print("The record ends in the middle of a line; everything before it was used.")
        if options.html is not None:
            options.html.write_text(replay_html(report, steps, options.record), encoding="utf-8")
            print(f"report: {options.html}")
        if options.json is not None:
            write_json(options.json, replay_json(report, options.record))
            print(f"figures: {options.json}")
    except (RecordFileError, ReplayError, OSError) as error:
        print(f"conflux replay: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def _replayed(record: str, *, quiet: bool) -> tuple[ReplayReport, Steps, bool]:
    with (
        RecordReader(record) as reader,
        tqdm(
            total=reader.size,
            unit="B",
            unit_scale=True,
            desc="replay",
            leave=False,
            disable=True if quiet else None,  # None: only on a terminal
        ) as bar,
    ):
        report, steps = run_replay(reader.header, reader, progress=lambda: bar.update(reader.position - bar.n))
        return report, steps, reader.truncated
