"""Every option's meaning, and every wrong value's one-line answer."""

from __future__ import annotations

import argparse
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.config import MAX_SLO_MS, MODES, OPTIONS, Config, ConfigError, add_arguments, positive_ms, raw_values


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
        *("--conflux-graph-budget-s", "7.5"),
        *("--conflux-learner", "tcp://127.0.0.1:7000", "--conflux-explore", "off"),
        *("--conflux-state-dir", str(tmp_path / "s"), "--conflux-record", str(tmp_path / "r.jsonl")),
    )
    assert config == Config(
        tbt_slo_s=0.05,
        ttft_slo_s=1.0,
        mode="spatial",
        fixed_split=22,
        max_look_ahead=4,
        graph_budget_s=7.5,
        sm_control="none",
        learner="tcp://127.0.0.1:7000",
        explore=False,
        state_dir=str(tmp_path / "s"),
        record=str(tmp_path / "r.jsonl"),
    )
    assert (tmp_path / "s").is_dir()


def test_the_number_of_gpus_reaches_the_config():
    assert parse().xp == 1
    assert parse("--conflux-xp", "4").xp == 4


def test_config_survives_the_way_to_the_scheduler(tmp_path):
    config = parse("--conflux-mode", "duet", "--conflux-fixed-split", "8", "--conflux-state-dir", str(tmp_path))
    assert Config(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ("--conflux-tbt-slo-ms", "0"),
            "--conflux-tbt-slo-ms must be a positive number of milliseconds (at most 1e+09), got '0'",
        ),
        (("--conflux-tbt-slo-ms", "fast"), "got 'fast'"),
        (("--conflux-tbt-slo-ms", "nan"), "got 'nan'"),
        (("--conflux-tbt-slo-ms", "2"), "--conflux-tbt-slo-ms must be at least 5, got 2"),
        (("--conflux-ttft-slo-ms", "1e10"), "(at most 1e+09), got '1e10'"),
        (("--conflux-ttft-slo-ms", "9" * 500), "got '999999999999999999999999999999999999..."),
        (("--conflux-learner", "tcp://*:8000"), "--conflux-learner must be"),
        (("--conflux-learner", "ipc://@x"), "--conflux-learner must be"),
        (("--conflux-record", "~nouser/r.jsonl"), "--conflux-record '~nouser/r.jsonl' cannot be written"),
        (("--conflux-record", "/tmp/" + "x" * 300), "cannot be written"),
        (("--conflux-state-dir", "/tmp/" + "x" * 300), "--conflux-state-dir"),
        (("--conflux-state-dir", "~nouser/x"), "--conflux-state-dir '~nouser/x' cannot be written"),
        (("--conflux-ttft-slo-ms", "-1"), "--conflux-ttft-slo-ms must be a positive"),
        (("--conflux-mode", "turbo"), "--conflux-mode must be one of auto, temporal"),
        (("--conflux-fixed-split", "8"), "--conflux-fixed-split needs --conflux-mode spatial, reserved or duet"),
        (("--conflux-mode", "spatial", "--conflux-fixed-split", "0"), "--conflux-fixed-split must be a whole number"),
        (("--conflux-mode", "spatial", "--conflux-fixed-split", "2.5"), "got '2.5'"),
        (("--conflux-xp", "0"), "--conflux-xp must be a whole number"),
        (("--conflux-xp", "2", "--conflux-mode", "spatial"), "leave out --conflux-mode"),
        (("--conflux-max-look-ahead", "0"), "--conflux-max-look-ahead must be a whole number from 1 to 64"),
        (("--conflux-max-look-ahead", "999"), "from 1 to 64"),
        (("--conflux-graph-budget-s", "-1"), "--conflux-graph-budget-s must be a number of seconds from 0 to 3600"),
        (("--conflux-graph-budget-s", "nan"), "--conflux-graph-budget-s must be"),
        (("--conflux-graph-budget-s", "soon"), "got 'soon'"),
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
def test_positive_ms_takes_positive_numbers_up_to_a_limit_and_nothing_else(value):
    possible = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_SLO_MS
    try:
        number = positive_ms("x", value, text=False)
    except ConfigError:
        assert not possible
    else:
        assert possible
        assert number == value


def test_numbers_beyond_floats_are_refused():
    with pytest.raises(ConfigError, match="x must be a positive number"):
        positive_ms("x", 10**400)


def test_a_record_may_not_be_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "loop"):
        with pytest.raises(ConfigError, match="--conflux-record"):
            parse("--conflux-record", str(tmp_path / name))
