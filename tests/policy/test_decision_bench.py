from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.decision import CASES, main


def test_the_benchmark_decides_what_its_cases_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures" / "decision.json"
    assert main(["--calls", "12", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert [case["case"] for case in figures["cases"]] == [case.name for case in CASES]
    for case in figures["cases"]:
        assert sum(case["decided"].values()) == case["calls"] == 12
        assert 0 < case["min_ms"] <= case["median_ms"] <= case["p99_ms"] <= case["max_ms"]
        assert case["after_snapshot_ms"] > 0
    decided = {case["case"]: set(case["decided"]) for case in figures["cases"]}
    assert decided[CASES[0].name] == {"temporal/fits"}
    assert decided[CASES[1].name] == {"chunked/best"}
    assert all(name.endswith("least_violation") for name in decided[CASES[4].name])
    assert decided[CASES[5].name] == {"spatial/best"}
    assert capsys.readouterr().out.count("\n") == len(CASES) + 3
