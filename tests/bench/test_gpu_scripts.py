"""What the scripts for a GPU make of what they measured."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import collect, exactness, interference, light_load, modes, shapes, sweep, systems, timeline
from bench.server import ServerError
from learner.shape import ModelShape
from sglang_ext.served import LoadResult, RequestResult

ROOT = Path(__file__).resolve().parents[2]


def one(index: int, sent_s: float, event_s: list[float]) -> RequestResult:
    counts = list(range(1, len(event_s) + 1))
    return RequestResult(index, sent_s, sent_s, event_s[-1] if event_s else sent_s, 10, 99, event_s, counts, "cut off")


def test_interference_counts_what_lies_in_the_measured_time() -> None:
    steady = [0.1 * step for step in range(40)]  # a token every 100 ms until 3.9 s
    decodes = [one(index, 0.0, steady) for index in range(interference.DECODES - 1)]
    # One of them stalls from 2.0 to 2.5 s.
    decodes.append(one(interference.DECODES - 1, 0.0, [at for at in steady if not 2.0 < at < 2.5]))
    prompts = [one(90, 0.5, [1.0]), one(91, 1.2, [2.0, 2.1]), one(92, 1.8, []), one(93, 2.5, [3.4])]
    found = interference.summary(LoadResult([*decodes, *prompts], 4.0), from_s=1.05, seconds=2.0, tbt_slo_ms=150.0)
    assert found["p50_itl_ms"] == pytest.approx(100, abs=0.1)
    assert found["max_itl_ms"] == pytest.approx(500, abs=0.1)
    per_decode = sum(1.05 <= at < 3.05 for at in steady)
    gaps = per_decode * interference.DECODES - 4
    assert found["decode_tokens_per_s"] == pytest.approx(gaps / 2.0)
    assert found["within_slo"] == pytest.approx(1 - 1 / gaps, abs=1e-5)
    # Sent in time to be answered: the second and third, of which one is; begun in that time: one prompt, two answers.
    assert (found["long_prompts"], found["long_unanswered"]) == (2, 1)
    assert found["mean_long_ttft_ms"] == found["max_long_ttft_ms"] == pytest.approx(800, abs=0.1)
    assert found["tokens_per_s"] == pytest.approx((gaps + interference.LONG_PROMPT + 2) / 2.0, abs=0.1)


def cell(gap_ms: float, **rates: tuple[float, float]) -> dict:
    measured = {mode: {"tokens_per_s": rate, "largest_gap_ms": gap} for mode, (rate, gap) in rates.items()}
    return modes.judged(gap_ms, measured)


def test_the_best_mode_serves_most_within_the_target() -> None:
    rates = {"temporal": (1000, 90), "chunked": (800, 24), "spatial": (850, 20), "reserved": (700, 15)}
    assert cell(25, **rates, auto=(840, 20)) == {
        "best": "spatial",
        "kept": True,
        "apart": True,
        "auto_is_as_good": True,
    }
    assert not cell(25, **rates, auto=(800, 24))["auto_is_as_good"]  # 6 % less
    assert not cell(25, **rates, auto=(1000, 90))["auto_is_as_good"]  # breaks the target
    alike = dict.fromkeys(modes.FORCED, (1000.0, 10.0))
    assert cell(25, **alike, auto=(980, 10)) | {"best": ""} == {
        "best": "",
        "kept": True,
        "apart": False,
        "auto_is_as_good": True,
    }


def test_where_no_mode_keeps_the_target_the_smallest_gap_is_best() -> None:
    rates = {"temporal": (1000, 90), "chunked": (800, 30), "spatial": (850, 28), "reserved": (700, 40)}
    found = cell(25, **rates, auto=(500, 28.5))
    assert (found["best"], found["kept"], found["apart"], found["auto_is_as_good"]) == ("spatial", False, True, True)
    assert not cell(25, **rates, auto=(900, 30))["auto_is_as_good"]


def test_verdict_is_over_all_cells() -> None:
    assert modes.verdict([]) == {"cells_measured": 0, "share_apart": 0.0, "share_auto_as_good": 0.0}
    cells = [{"apart": True, "auto_is_as_good": True}, {"apart": False, "auto_is_as_good": True}]
    assert modes.verdict(cells) == {"cells_measured": 2, "share_apart": 0.5, "share_auto_as_good": 1.0}


def test_light_load_compares_in_pairs() -> None:
    pairs = [{"stock": (10.0 + n, 5.0), "conflux": (1.01 * (10.0 + n), 5.0)} for n in range(9)]
    found = light_load.compare(pairs)
    assert (found["ttft_change_pct"], found["ttft_change_half_width_pct"]) == (pytest.approx(1.0), pytest.approx(0.0))
    assert (found["tpot_change_pct"], found["pairs"]) == (0.0, 9)


def test_answers_are_the_same_up_to_where_they_part() -> None:
    assert exactness.parts_at([1, 2, 3], [1, 2, 4]) == 2
    assert exactness.parts_at([1, 2], [1, 2, 3]) == 2
    assert exactness.same([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == {
        "requests": 2,
        "identical": 1,
        "tokens": 5,
        "same_tokens": 3,
        "parted": [(0, 1)],
    }


@pytest.mark.parametrize("name", sorted({*shapes.SHAPES} - {"tiny"}))
def test_shapes_are_models_that_conflux_serves(name: str, tmp_path: Path) -> None:
    folder = shapes.shape_folder(name, tmp_path)
    assert (folder / "config.json").exists()
    shape = ModelShape.from_hf_config({**shapes._COMMON, **shapes.SHAPES[name]}, name=name, dtype="bfloat16")
    # The numbers are those of a model of the size that its name says.
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    billions = (shape.layers * layer + 2 * shape.vocabulary * shape.hidden) / 1e9
    assert billions == pytest.approx(float(name.rpartition("-")[2].removesuffix("B")), rel=0.06)
    assert "--incremental-streaming-output" in shapes.gpu_args(folder)


def test_a_timeline_is_drawn_from_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ROOT / "bench" / "results" / "h200-qwen3-8b-reserved-beside.jsonl.gz"
    picture = tmp_path / "window.svg"
    asked = [str(record), "--from", "233", "--to", "248", "--output", str(picture)]
    monkeypatch.setattr("sys.argv", ["timeline", *asked])
    assert timeline.main() == 0
    text = picture.read_text()
    assert text.startswith("<?xml")
    monkeypatch.setattr("sys.argv", ["timeline", str(record), "--from", "99999", "--to", "99999", "--output", "x.svg"])
    assert timeline.main() == 1


def test_prefill_graph_sizes_ascend() -> None:
    assert all(a < b for a, b in itertools.pairwise(shapes.PREFILL_GRAPH_TOKENS))


def test_groups_share_one_server_among_confluxs_modes() -> None:
    names = ["conflux-auto", "stock", "conflux-duet", "stock-mixed-512"]
    assert systems.groups(names) == [["stock"], ["stock-mixed-512"], ["conflux-auto", "conflux-duet"]]
    assert systems.groups(["stock"]) == [["stock"]]
    with pytest.raises(ValueError, match="unknown system 'vllm'"):
        systems.groups(["vllm"])


class FakeServer:
    """Starts unless its name says otherwise; notes when it runs."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log
        self.url = f"http://{name}"

    def start(self) -> FakeServer:
        if self.name.endswith("-2048"):
            raise ServerError("no memory")
        self._log.append(f"start {self.name}")
        return self

    def stop(self) -> None:
        self._log.append(f"stop {self.name}")


@pytest.mark.parametrize("together", [1, 3])
def test_servers_that_run_together_are_measured_in_turns(monkeypatch, together: int) -> None:
    log: list[str] = []
    monkeypatch.setattr(systems, "server", lambda first, given, **options: FakeServer(first, log))
    names = ["stock", "stock-mixed-512", "stock-mixed-2048", "conflux-auto", "conflux-duet"]
    given = argparse.Namespace(systems=names, together=together)
    done: set[tuple[str, int]] = {("stock", 1)}

    def missing(asked: list[str]) -> list[tuple[str, int]]:
        return [(name, load) for name in asked for load in (1, 2) if (name, load) not in done]

    def measure(running: FakeServer, point: tuple[str, int]) -> None:
        log.append(f"{point[0]} {point[1]}")
        if point == ("conflux-auto", 2):
            raise ServerError("it ended")
        assert running.name == ("conflux-auto" if point[0].startswith("conflux") else point[0])
        done.add(point)

    assert systems.measure_missing(given, missing, measure, time.monotonic() + 60.0) == 3
    # What failed is missing still: the server that did not start, and the one that ended with all that it had left.
    assert missing(names) == [
        *(("stock-mixed-2048", load) for load in (1, 2)),
        ("conflux-auto", 2),
        ("conflux-duet", 2),
    ]
    started, stopped = ([line for line in log if line.startswith(what)] for what in ("start", "stop"))
    assert len(started) == len(stopped) == 3
    if together == 3:
        first = log[: log.index("stop stock")]
        assert sorted(first[:2]) == ["start stock", "start stock-mixed-512"]
        assert first[2:] == ["stock-mixed-512 1", "stock 2", "stock-mixed-512 2"]
    assert systems.measure_missing(given, missing, measure, time.monotonic() - 1.0) == 3


def test_a_sweep_knows_what_it_lacks_and_judges_by_every_target() -> None:
    given = argparse.Namespace(
        poisson=False,
        trace=Path("x/azure.csv"),
        rates=[2.0, 4.0],
        tbt_slo_ms=[25.0, 50.0],
        ttft_slo_ms=1000.0,
        model="Qwen3-8B",
    )
    asked = sweep.missing({"points": []}, ["stock", "conflux-auto"], given)
    assert len(asked) == 2 + 4
    done = {"points": [{**asked[0]._asdict(), "model": "Qwen3-8B"}, {**asked[2]._asdict(), "model": "other"}]}
    assert sweep.missing(done, ["stock", "conflux-auto"], given) == asked[1:]
    slow = RequestResult(0, 0.0, 0.0, 0.4, 10, 3, [0.3, 0.34, 0.38], [1, 2, 3])
    quick = RequestResult(1, 0.0, 0.0, 0.4, 10, 3, [0.3, 0.32, 0.34], [1, 2, 3])
    found = sweep.figures(LoadResult([slow, quick], 1.0), asked[0], given)
    assert found["strict"] == {"25": 0.5, "50": 1.0}
    assert found["completed"] == 2
    assert found["max_itl_ms"] == pytest.approx(40.0)


def test_collected_loads_are_of_their_kind() -> None:
    rng = random.Random(1)
    for kind in collect.KINDS:
        plan = collect.requests(kind, 25.0, 4.0, 2000, rng)
        assert len(plan) >= 0.5 * 4.0 * kind.rate
        assert [one.arrival_s for one in plan] == sorted(one.arrival_s for one in plan)
        assert all(kind.prompt[0] <= len(one.input_ids) <= kind.prompt[1] for one in plan)
        assert all(kind.answer[0] <= one.output_tokens <= kind.answer[1] for one in plan)


def test_a_pdmux_server_has_the_attribute_that_stock_lacks() -> None:
    name = "sglang.srt.multiplex.multiplexing_mixin"
    code = f"import {name} as m, types; c = m.SchedulerMultiplexMixin; s = c.__new__(c); "
    code += "s.ps = types.SimpleNamespace(gpu_id=3); print(s.gpu_id)"
    path = os.pathsep.join([str(ROOT / "bench" / "pdmux"), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **more}, capture_output=True, text=True)
        for more in ({}, {"PYTHONPATH": path})
    ]
    assert found[0].returncode != 0
    assert "no attribute 'gpu_id'" in found[0].stderr
    assert (found[1].returncode, found[1].stdout) == (0, "3\n"), found[1].stderr
