"""What an operator can say to conflux, and what is said back when it makes no sense.

Pure: imports neither torch nor sglang, so that ``conflux --help`` and every error are instant.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.address import AddressError, check_address

MODES = ("auto", "temporal", "chunked", "spatial", "reserved", "duet")
RANDOM = "random"  # a mode drawn anew for every iteration; for tests, with CONFLUX_TESTING set
SM_CONTROLS = ("auto", "smctrl", "green", "none")
SWITCH = ("on", "off")

MIN_TBT_SLO_MS = 5.0
MOST_LOOK_AHEAD = 64
MAX_SLO_MS = 1e9


class ConfigError(ValueError):
    """A value or a combination of flags that conflux cannot serve. The message names the flag and the remedy."""


FORCED_WINDOWS = ("spatial", "reserved", "duet")
"""Modes that open a window wherever they can."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One command-line option: its field in :class:`Config`, default, metavariable and help."""

    field: str
    default: Any
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return "--conflux-" + self.field.replace("_", "-")


OPTIONS: tuple[Option, ...] = (
    Option("tbt_slo_ms", 100.0, "MS", "target for the time between two tokens of a request (default: 100)"),
    Option("ttft_slo_ms", 2000.0, "MS", "target for the time to a request's first token (default: 2000)"),
    Option(
        "mode",
        "auto",
        "MODE",
        "how prefill and decode share the device: auto weighs mixed batches, whole and cut, and where the device can "
        "run both at once windows, by prediction; temporal, chunked, spatial and reserved force one; duet is "
        "DuetServe's algorithm as published (default: auto)",
    ),
    Option("fixed_split", None, "TPCS", "give decode this many TPCs in every spatial iteration (default: decided)"),
    Option("max_look_ahead", None, "K", "most decode steps launched ahead of the host (default: 64 where prefill and "
           "decode run at once, else 8)"),
    Option("graph_budget_s", 20.0, "S", "seconds of start-up that decode graphs for partitions may take; 0: prefill "
           "and decode never run at once (default: 20)"),
    Option("sm_control", "auto", "WAY", "auto, smctrl (stream masks), green (green contexts) or none (default: auto)"),
    Option("learner", "on", "on|off|ADDRESS", "learn latencies from live timings, in a process of its own or at a ZMQ "
           "address where `conflux learner` runs (default: on)"),
    Option("explore", "on", "on|off", "while there is slack, try other modes now and then, where auto has more than "
           "mixed batches to choose from (default: on)"),
    Option("xp", 1, "N", "serve on N GPUs as one: prefills spread over all, each decode on one (default: 1)"),
    Option("state_dir", None, "DIR", "where device curves and learnt models are kept (default: ~/.cache/conflux)"),
    Option("record", None, "PATH", "write every iteration's inputs, decision and timing to this file (.jsonl or .gz)"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Validated settings of one server. Times in seconds."""

    tbt_slo_s: float = 0.1
    ttft_slo_s: float = 2.0
    mode: str = "auto"
    fixed_split: int | None = None
    max_look_ahead: int | None = None
    graph_budget_s: float = 20.0
    sm_control: str = "auto"
    learner: str = "on"
    explore: bool = True
    xp: int = 1
    state_dir: str = ""
    record: str | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Config:
        """Build from option values by field name (as :data:`OPTIONS` names them); strings or typed values.

        Missing fields take their defaults. Raises ConfigError, naming flag and remedy.
        """
        known = {option.field for option in OPTIONS}
        for name in raw:
            if name not in known:
                raise ConfigError(f"conflux_{name} is no option of conflux; see `conflux --help`")
        value = {o.field: raw.get(o.field, o.default) for o in OPTIONS}
        value = {o.field: o.default if value[o.field] is None else value[o.field] for o in OPTIONS}
        modes = (*MODES, RANDOM) if os.environ.get("CONFLUX_TESTING") else MODES
        mode = _choice("--conflux-mode", value["mode"], modes)
        xp = _integer("--conflux-xp", value["xp"], least=1)
        if xp > 1 and mode != "auto":
            raise ConfigError(
                "--conflux-xp decides by itself how prefill and decode share GPUs: leave out --conflux-mode"
            )
        split = value["fixed_split"]
        if split is not None:
            split = _integer("--conflux-fixed-split", split, least=1)
            if mode not in FORCED_WINDOWS:
                raise ConfigError(
                    "--conflux-fixed-split needs --conflux-mode spatial, reserved or duet: add one of them"
                )
        steps = value["max_look_ahead"]
        if steps is not None:
            steps = _integer("--conflux-max-look-ahead", steps, least=1, most=MOST_LOOK_AHEAD)
        return cls(
            tbt_slo_s=_tbt_slo_s(value["tbt_slo_ms"]),
            ttft_slo_s=positive_ms("--conflux-ttft-slo-ms", value["ttft_slo_ms"]) / 1e3,
            mode=mode,
            fixed_split=split,
            max_look_ahead=steps,
            graph_budget_s=_seconds("--conflux-graph-budget-s", value["graph_budget_s"]),
            sm_control=_choice("--conflux-sm-control", value["sm_control"], SM_CONTROLS),
            learner=_learner(value["learner"]),
            explore=_switch("--conflux-explore", value["explore"]),
            xp=xp,
            state_dir=_state_dir(value["state_dir"]),
            record=_record(value["record"]),
        )

    def changed(self, given: Mapping[str, Any]) -> Config:
        """The same with another mode or other targets, by the options' field names; a mode may be its number in MODES.

        Raises ConfigError for a value that is none, or for an option that cannot change while a server runs.
        """
        values: dict[str, Any] = {}
        for name, value in given.items():
            flag = f"--conflux-{name.replace('_', '-')}"
            if name == "mode":
                known = isinstance(value, int | float) and not isinstance(value, bool) and value in range(len(MODES))
                values["mode"] = _choice(flag, MODES[int(value)] if known else value, MODES)
            elif name == "tbt_slo_ms":
                values["tbt_slo_s"] = _tbt_slo_s(value)
            elif name == "ttft_slo_ms":
                values["ttft_slo_s"] = positive_ms(flag, value) / 1e3
            else:
                raise ConfigError(f"{flag} cannot be changed while serving")
        return dataclasses.replace(self, **values)

    @property
    def two_halves(self) -> bool:
        """Whether the mode runs windows, whose halves run at once where the device can."""
        return self.mode == "auto" or self.mode in FORCED_WINDOWS

    def look_ahead(self, concurrent: bool) -> int:
        """The most decode steps ahead of the host. Beside a prefill they must outlast it; in front of one each of
        them makes it wait."""
        return self.max_look_ahead or (MOST_LOOK_AHEAD if concurrent else 8)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add conflux's group. Values stay strings: argparse's own errors would print SGLang's whole usage."""
    group = parser.add_argument_group("conflux", "Share each GPU between prefill and decode by a learnt latency model.")
    group.add_argument(
        "--backend", default="sglang", metavar="sglang|conflux", help="scheduler to serve with (default: sglang)"
    )
    for option in OPTIONS:
        group.add_argument(option.flag, default=None, metavar=option.metavar, help=option.help)


def raw_values(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, by field name, out of ``conflux_<field>`` entries."""
    return {
        name.removeprefix("conflux_"): value
        for name, value in namespace.items()
        if name.startswith("conflux_") and value is not None
    }


def positive_ms(name: str, value: object, *, text: bool = True) -> float:
    """``value`` as milliseconds. Raises ConfigError unless it is a number above zero and at most MAX_SLO_MS.

    ``text``: whether a string that spells a number will do. A bool never does.
    """
    number = _number(value, text=text)
    if not 0 < number <= MAX_SLO_MS:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        raise ConfigError(f"{name} must be a positive number of milliseconds (at most {MAX_SLO_MS:g}), got {shown}")
    return number


def _number(value: object, *, text: bool = True) -> float:
    """``value`` as a number, or NaN. ``text``: whether a string that spells one will do. A bool never does."""
    kinds = int | float | str if text else int | float
    if isinstance(value, kinds) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    return math.nan


def _tbt_slo_s(value: object) -> float:
    tbt_slo_ms = positive_ms("--conflux-tbt-slo-ms", value)
    if tbt_slo_ms < MIN_TBT_SLO_MS:
        raise ConfigError(f"--conflux-tbt-slo-ms must be at least {MIN_TBT_SLO_MS:g}, got {tbt_slo_ms:g}")
    return tbt_slo_ms / 1e3


def _seconds(name: str, value: object) -> float:
    number = _number(value)
    if not 0 <= number <= 3600:
        raise ConfigError(f"{name} must be a number of seconds from 0 to 3600, got {value!r}")
    return number


def _integer(name: str, value: object, *, least: int, most: int | None = None) -> int:
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    try:
        if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
            raise ValueError
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} must be a whole number {bounds}, got {value!r}") from None
    if number < least or (most is not None and number > most):
        raise ConfigError(f"{name} must be a whole number {bounds}, got {number}")
    return number


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return str(value)


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    return _choice(name, value, SWITCH) == "on"


def _learner(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = str(value)
    if text in SWITCH:
        return text
    try:
        if "://" not in text or text.startswith(("tcp://*", "tcp://0.0.0.0")):
            raise AddressError("no address to connect to")
        return check_address(text)
    except AddressError as error:
        raise ConfigError(
            f"--conflux-learner must be on, off, or the address of a running `conflux learner` "
            f"(tcp://HOST:PORT or ipc://PATH), got {text!r}: {error}"
        ) from None


def _state_dir(value: object) -> str:
    try:
        path = Path(str(value)).expanduser() if value else default_state_dir()
        if value and path.exists() and not path.is_dir():
            raise ConfigError(f"--conflux-state-dir {str(path)!r} is not a directory: name one, or leave the flag out")
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        usable = os.access(path, os.W_OK | os.X_OK)
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError):
        usable = False
    if not usable:
        raise ConfigError(f"--conflux-state-dir {str(value or path)!r} cannot be written: name a directory that can")
    return str(path)


def default_state_dir() -> Path:
    """``$XDG_CACHE_HOME/conflux``, or ``~/.cache/conflux``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "conflux"


def _record(value: object) -> str | None:
    if value is None:
        return None
    try:
        path = Path(str(value)).expanduser()
        if path.is_dir():
            raise ConfigError(f"--conflux-record {str(path)!r} is a directory: name a file in it")
        if not path.parent.is_dir():
            raise ConfigError(f"--conflux-record: there is no directory {str(path.parent)!r}: create it first")
        exists = path.exists() or path.is_symlink()
        if exists and not (path.is_file() or path.is_char_device()):
            raise ConfigError(f"--conflux-record {str(path)!r} is no file: name another")
        writable = os.access(path if exists else path.parent, os.W_OK) and len(os.fsencode(path.name)) <= 255
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError):
        writable = False
    if not writable:
        raise ConfigError(f"--conflux-record {str(value)!r} cannot be written: name another file")
    return str(path)
