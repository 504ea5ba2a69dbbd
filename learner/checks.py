"""Is a record possible? Checks of a header and an iteration that came from another process or from a file.

Types are msgspec's business; this is about values: finite, not negative, within bounds that no real server reaches,
and columns of equal length. A step that ends before it starts passes here: that is a bad measurement, not a malformed
record, and the estimator counts it as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from learner.records import SCHEMA, Candidates, Header, Iteration, StreamRecord

MAX_REQUESTS = 65_536  # per stream
MAX_STEPS = 4_096  # per stream
MAX_STREAMS = 16
MAX_CANDIDATES = 4_096
MAX_TOKENS = 2**31 - 1
MAX_TPCS = 4_096
MAX_SECONDS = 1e6  # of anything that is a duration
MAX_UNIX_S = 1e11
MAX_TEXT = 256
MAX_ENTRIES = 256
MAX_RATE = 1e20  # FLOP/s or bytes/s

PHASES = ("prefill", "decode", "mixed")


class InvalidRecordError(ValueError):
    """A record holds a value that cannot be."""


def check_header(header: Header) -> None:
    """Raise :class:`InvalidRecordError` unless ``header`` could describe a real model on a real device."""
    _check_schema(header.schema)
    model, device = header.model, header.device
    _number("created_unix_s", header.created_unix_s, MAX_UNIX_S)
    _number("tbt_slo_s", header.tbt_slo_s, MAX_SECONDS)
    _number("ttft_slo_s", header.ttft_slo_s, MAX_SECONDS)
    for what, text in (
        ("model.name", model.name),
        ("device.name", device.name),
        ("dtype", header.dtype),
        ("kv_dtype", header.kv_dtype),
        ("mode", header.mode),
    ):
        _text(what, text)
    for what, count, most in (
        ("model.layers", model.layers, 100_000),
        ("model.hidden", model.hidden, 2**24),
        ("model.heads", model.heads, 2**20),
        ("model.kv_heads", model.kv_heads, 2**20),
        ("model.head_dim", model.head_dim, 2**20),
        ("model.intermediate", model.intermediate, 2**26),
        ("model.vocabulary", model.vocabulary, 2**28),
        ("model.tp", model.tp, 65_536),
        ("tp", header.tp, 65_536),
        ("xp", header.xp, 65_536),
        ("device.tpcs", device.tpcs, MAX_TPCS),
    ):
        _count(what, count, most, least=1)
    for what, width in (
        ("model.weight_bytes", model.weight_bytes),
        ("model.activation_bytes", model.activation_bytes),
        ("model.kv_bytes", model.kv_bytes),
    ):
        _number(what, width, 64.0)
    _number("device.link_bandwidth", device.link_bandwidth, MAX_RATE)
    _curve("device.flops", device.flops)
    _curve("device.bandwidth", device.bandwidth)
    _entries("device.provenance", device.provenance)
    _entries("versions", header.versions)


def check_iteration(iteration: Iteration) -> None:
    """Raise :class:`InvalidRecordError` unless every number is finite, not negative and bounded, and columns match."""
    _check_schema(iteration.schema)
    _count("iteration", iteration.iteration, 2**62)
    _number("time_s", iteration.time_s, MAX_UNIX_S)
    _text("mode", iteration.mode)
    _text("reason", iteration.reason)
    _number("tbt_slo_s", iteration.tbt_slo_s, MAX_SECONDS)
    _number("host_overhead_s", iteration.host_overhead_s, MAX_SECONDS)
    _count("model_version", iteration.model_version, 2**62)
    _count("running", iteration.running, MAX_TOKENS)
    _count("waiting", iteration.waiting, MAX_TOKENS)
    last = MAX_CANDIDATES
    if iteration.candidates is not None:
        last = len(iteration.candidates.mode) - 1
        _check_candidates(iteration.candidates)
    _count("decision", iteration.decision, last, least=-1)  # -1: none of them
    if len(iteration.streams) > MAX_STREAMS:
        raise InvalidRecordError(f"{len(iteration.streams)} streams; at most {MAX_STREAMS} are allowed")
    for stream in iteration.streams:
        _check_stream(stream)


def _check_candidates(candidates: Candidates) -> None:
    rows = len(candidates.mode)
    if rows > MAX_CANDIDATES:
        raise InvalidRecordError(f"{rows} candidates; at most {MAX_CANDIDATES} are allowed")
    for what in candidates.__struct_fields__:
        _length(f"candidates.{what}", getattr(candidates, what), rows)
    for text in set(candidates.mode):
        _text("candidates.mode", text)
    for what, most in (
        ("prefill_tokens", MAX_TOKENS),
        ("prefill_tpcs", MAX_TPCS),
        ("decode_tpcs", MAX_TPCS),
        ("look_ahead_steps", MAX_STEPS),
    ):
        _counts(f"candidates.{what}", getattr(candidates, what), most)
    for what in ("predicted_s", "upper_s", "roofline_s", "largest_gap_s"):
        _numbers(f"candidates.{what}", getattr(candidates, what), MAX_SECONDS)
    _numbers("candidates.tokens_per_s", candidates.tokens_per_s, MAX_RATE)


def _check_stream(stream: StreamRecord) -> None:
    if stream.phase not in PHASES:
        raise InvalidRecordError(f"phase is {_shown(stream.phase)}; one of {', '.join(PHASES)} is expected")
    _count("tpcs", stream.tpcs, MAX_TPCS, least=1)
    requests, steps = len(stream.q), len(stream.step_end_s)
    if requests > MAX_REQUESTS:
        raise InvalidRecordError(f"{requests} requests in a stream; at most {MAX_REQUESTS} are allowed")
    if steps > MAX_STEPS:
        raise InvalidRecordError(f"{steps} steps in a stream; at most {MAX_STEPS} are allowed")
    _length("c", stream.c, requests)
    _counts("q", stream.q, MAX_TOKENS)
    _counts("c", stream.c, MAX_TOKENS)
    _count("logits_rows", stream.logits_rows, MAX_TOKENS)
    for what in ("step_start_s", "step_end_s", "predicted_s", "upper_s", "roofline_s"):
        values: list[float] = getattr(stream, what)
        _length(what, values, steps)
        _numbers(what, values, MAX_SECONDS)
    if stream.launch_s:
        _length("launch_s", stream.launch_s, steps)
        _numbers("launch_s", stream.launch_s, MAX_SECONDS)


def _check_schema(schema: int) -> None:
    if schema != SCHEMA:
        raise InvalidRecordError(f"schema {schema} is not supported; {SCHEMA} is")


def _number(what: str, value: float, most: float) -> None:
    if not 0.0 <= value <= most:  # false for NaN too
        raise InvalidRecordError(f"{what} is {value}; 0 to {most:g} is allowed")


def _numbers(what: str, values: Sequence[float], most: float) -> None:
    # One pass in C for the usual case: a sum is finite only if no value is NaN or infinite, and then min and max order.
    if values and not (math.isfinite(sum(values)) and min(values) >= 0.0 and max(values) <= most):
        for value in values:
            _number(what, value, most)


def _count(what: str, value: int, most: int, least: int = 0) -> None:
    if not least <= value <= most:
        raise InvalidRecordError(f"{what} is {value}; {least} to {most} is allowed")


def _counts(what: str, values: Sequence[int], most: int) -> None:
    if values and not (min(values) >= 0 and max(values) <= most):
        for value in values:
            _count(what, value, most)


def _length(what: str, values: Sequence[object], expected: int) -> None:
    if len(values) != expected:
        raise InvalidRecordError(f"{what} has {len(values)} entries where {expected} are expected")


def _text(what: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise InvalidRecordError(f"{what} has {len(text)} characters; at most {MAX_TEXT} are allowed")


def _entries(what: str, entries: dict[str, str]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise InvalidRecordError(f"{what} has {len(entries)} entries; at most {MAX_ENTRIES} are allowed")
    for name, text in entries.items():
        _text(what, name)
        if len(text) > 16 * MAX_TEXT:
            raise InvalidRecordError(f"{what}[{_shown(name)}] has {len(text)} characters")


def _curve(what: str, points: Sequence[tuple[float, float]]) -> None:
    # The profile itself insists on ascending points and positive rates.
    if len(points) > MAX_TPCS:
        raise InvalidRecordError(f"{what} has {len(points)} points; at most {MAX_TPCS} are allowed")
    for _, rate in points:
        _number(what, rate, MAX_RATE)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")
