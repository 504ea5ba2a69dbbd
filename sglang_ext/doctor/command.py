"""The command ``conflux doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.config import default_state_dir
from sglang_ext.doctor.advice import judge
from sglang_ext.doctor.gather import NoSuchGpuError, gather
from sglang_ext.doctor.render import as_json, as_text

CANNOT_SERVE = 1
USAGE_ERROR = 2


def doctor_parser() -> argparse.ArgumentParser:
    """The options of ``conflux doctor``."""
    options = argparse.ArgumentParser(
        prog="conflux doctor",
        description="Say what this machine can do, what conflux will do on it, and what you could change.",
        epilog="Exit status: 0, or 1 if conflux could not serve here at all.",
        allow_abbrev=False,
    )
    options.add_argument("--json", action="store_true", help="print it as JSON, with names that do not change")
    options.add_argument(
        "--no-test", action="store_true", help="run nothing on the GPU: for one that is busy; SM control stays untested"
    )
    options.add_argument("--device", type=int, default=0, metavar="N", help="which visible GPU to test (default: 0)")
    options.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="what you give --conflux-state-dir (default: ~/.cache/conflux)"
    )
    return options


def doctor(argv: Sequence[str] | None = None) -> int:
    """Print the report. Returns 0, 1 if conflux could not serve here at all, 2 for options that make no sense."""
    options = doctor_parser().parse_args(argv)
    state_dir = (options.state_dir or default_state_dir()).expanduser()
    try:
        facts = gather(state_dir, ordinal=options.device, test=not options.no_test)
    except NoSuchGpuError as error:
        print(f"conflux doctor: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    report = judge(facts)
    print(as_json(report) if options.json else as_text(report))
    return 0 if report.serving.possible else CANNOT_SERVE
