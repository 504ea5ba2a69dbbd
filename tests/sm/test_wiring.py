"""Where a server's start meets SM control: what is asked for, shown and counted."""

from __future__ import annotations

import types
from typing import Any

import pytest

from learner.device import DeviceProfile
from learner.latency import LatencyModel
from learner.records import Header
from learner.shape import ModelShape
from sglang_ext.config import Config
from sglang_ext.controller import Controller
from sglang_ext.policy.types import Settings
from sglang_ext.sm.control import NoControl
from sglang_ext.sm.select import Chosen
from sglang_ext.timing import WallClock

SHAPE = ModelShape(name="m", layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocabulary=1000)
PROFILE = DeviceProfile(name="cpu", tpcs=1, flops=((1.0, 2e10),), bandwidth=((1.0, 5e9),))


class Watched(NoControl):
    closed = 0

    def close(self) -> None:
        self.closed += 1


class Metrics:
    def __init__(self) -> None:
        self.said: list[tuple[str, bool]] = []

    def sm_control(self, kind: str, fell_back: bool) -> None:
        self.said.append((kind, fell_back))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def controller(sm: Chosen | None, metrics: Any = None) -> Controller:
    header = Header(created_unix_s=1.0, model=SHAPE, device=PROFILE)
    model = LatencyModel(SHAPE, PROFILE)
    return Controller(Config(), header, model, Settings(), WallClock(), metrics=metrics, sm=sm)


def test_the_choice_is_shown_counted_and_closed() -> None:
    control, metrics = Watched(), Metrics()
    reasons = {"smctrl": "no stream mask found", "green": "no green contexts"}
    made = controller(Chosen(control, "auto", reasons), metrics)
    state = made.state()
    assert state["sm_control"] == {"wanted": "auto", "kind": "none", "levels": [], "reasons": reasons}
    assert state["concurrent"] is False
    assert state["fallbacks"] == {"sm_control": 1}
    assert metrics.said == [("none", True)]
    made.close()
    assert control.closed == 1


def test_nothing_is_counted_where_nothing_was_missed() -> None:
    assert controller(Chosen(NoControl(), "none", {})).state()["fallbacks"] == {}
    assert controller(None).state()["sm_control"] is None


def test_the_metrics_name_the_way(prometheus: Any) -> None:
    from sglang_ext.metrics import Metrics as Real

    Real("sm-wiring").sm_control("green", True)
    text = prometheus.generate_latest().decode()
    assert 'conflux:sm_control{kind="green",model_name="sm-wiring"} 1.0' in text
    assert 'conflux:fallbacks_total{model_name="sm-wiring",reason="sm_control"} 1.0' in text


def asked(**changes: Any) -> types.SimpleNamespace:
    """SGLang's arguments as far as they matter here."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    }
    model = types.SimpleNamespace(
        hf_config=types.SimpleNamespace(to_dict=lambda: config), dtype="torch.bfloat16", model_path="/models/q"
    )
    return types.SimpleNamespace(
        device="cuda",
        tp_size=2,
        get_model_config=lambda: model,
        _conflux={**Config(**changes).to_dict(), "learner_address": None},
    )


def test_a_server_asks_for_its_own_gpu_and_needs_the_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = pytest.importorskip("sglang_ext.compat.setup")
    seen: list[Any] = []
    monkeypatch.setattr(setup, "choose", lambda *args, **kwargs: seen.append((args, kwargs)))
    setup.choose_sm_control(asked(sm_control="green", state_dir="/state", mode="spatial", fixed_split=22), 3)
    ((args, kwargs),) = seen
    assert args[:3] == ("green", 3, "/state")
    assert (kwargs["only"], kwargs["gemm"]) == (22, "require")
    assert {(1024, 2048), (1536, 1024), (1024, 75968)} <= set(kwargs["shapes"])  # each rank's own of the model
    assert {(4096, 4096), (1024, 1024)} <= set(kwargs["shapes"])


def test_a_server_on_a_cpu_asks_for_nothing() -> None:
    setup = pytest.importorskip("sglang_ext.compat.setup")
    arguments = asked()
    arguments.device = "cpu"
    chosen = setup.choose_sm_control(arguments, 0)
    assert chosen.control.kind == "none"
    assert not chosen.fell_back
