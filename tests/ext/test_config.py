"""Every option's meaning, and every wrong value's one-line answer."""

from __future__ import annotations

import argparse
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.config import MODES, OPTIONS, Config, ConfigError, add_arguments, positive_ms, raw_values


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def parse(*argv: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Config.parse(raw_values(vars(parser.parse_args(argv))))


def test_defaults_are_the_documented_ones(tmp_path):
    config = parse()
    assert (config.tbt_slo_s, config.ttft_slo_s, config.mode) == (0.1, 2.0, "auto")
    assert config.explore
    assert config.learner == "on"
    assert config.fixed_split is None
    assert config.record is None
    assert config.state_dir == str(tmp_path / "cache" / "conflux")


def test_every_option_reaches_the_config(tmp_path):
    config = parse(
        *("--conflux-tbt-slo-ms", "50", "--conflux-ttft-slo-ms", "1e3", "--conflux-mode", "spatial"),
        *("--conflux-fixed-split", "22", "--conflux-max-look-ahead", "4", "--conflux-sm-control", "none"),
        *("--conflux-learner", "tcp://127.0.0.1:7000", "--conflux-explore", "off"),
        *("--conflux-state-dir", str(tmp_path / "s"), "--conflux-record", str(tmp_path / "r.jsonl")),
    )
    assert config == Config(
        tbt_slo_s=0.05,
        ttft_slo_s=1.0,
        mode="spatial",
        fixed_split=22,
        max_look_ahead=4,
        sm_control="none",
        learner="tcp://127.0.0.1:7000",
        explore=False,
        state_dir=str(tmp_path / "s"),
        record=str(tmp_path / "r.jsonl"),
    )
    assert (tmp_path / "s").is_dir()


def test_config_survives_the_way_to_the_scheduler(tmp_path):
    config = parse("--conflux-mode", "duet", "--conflux-fixed-split", "8", "--conflux-state-dir", str(tmp_path))
    assert Config(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--conflux-tbt-slo-ms", "0"), "--conflux-tbt-slo-ms must be a positive number of milliseconds, got '0'"),
        (("--conflux-tbt-slo-ms", "fast"), "got 'fast'"),
        (("--conflux-tbt-slo-ms", "nan"), "got 'nan'"),
        (("--conflux-tbt-slo-ms", "2"), "--conflux-tbt-slo-ms must be at least 5, got 2"),
        (("--conflux-ttft-slo-ms", "-1"), "--conflux-ttft-slo-ms must be a positive"),
        (("--conflux-mode", "turbo"), "--conflux-mode must be one of auto, temporal"),
        (("--conflux-fixed-split", "8"), "--conflux-fixed-split needs --conflux-mode spatial, reserved or duet"),
        (("--conflux-mode", "spatial", "--conflux-fixed-split", "0"), "--conflux-fixed-split must be a whole number"),
        (("--conflux-mode", "spatial", "--conflux-fixed-split", "2.5"), "got '2.5'"),
        (("--conflux-max-look-ahead", "0"), "--conflux-max-look-ahead must be a whole number from 1 to 64"),
        (("--conflux-max-look-ahead", "999"), "from 1 to 64"),
        (("--conflux-sm-control", "mps"), "--conflux-sm-control must be one of auto, smctrl, green, none"),
        (("--conflux-learner", "localhost:7000"), "--conflux-learner must be on, off, or the address"),
        (("--conflux-learner", "tcp://host:99999"), "--conflux-learner must be"),
        (("--conflux-explore", "maybe"), "--conflux-explore must be one of on, off"),
        (("--conflux-record", "/no/such/dir/r.jsonl"), "--conflux-record: there is no directory '/no/such/dir'"),
        (("--conflux-record", "/tmp"), "--conflux-record '/tmp' is a directory"),
        (("--conflux-state-dir", "/dev/null"), "--conflux-state-dir '/dev/null' is not a directory"),
        (("--conflux-state-dir", "/dev/null/x"), "--conflux-state-dir '/dev/null/x' cannot be written"),
    ],
)
def test_wrong_values_name_the_flag_and_the_remedy(argv, words):
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_python_options_are_named():
    with pytest.raises(ConfigError, match="conflux_tbt_slo is no option"):
        Config.parse({"tbt_slo": 5})


def test_help_mentions_every_option():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = parser.format_help()
    assert all(option.flag in text for option in OPTIONS)
    assert all(mode in text for mode in MODES)


@given(st.one_of(st.floats(), st.integers(), st.text(max_size=8), st.none(), st.booleans(), st.lists(st.integers())))
def test_positive_ms_takes_positive_finite_numbers_and_nothing_else(value):
    try:
        number = positive_ms("x", value)
    except ConfigError:
        assert isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0)
    else:
        assert math.isfinite(number)
        assert number > 0
