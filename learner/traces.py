"""Public request traces: when requests came and how long they were. No text.

- Azure LLM inference traces (2023, 2024): CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``
- Mooncake traces (FAST '25): JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``

All functions take and return lists of :class:`TraceRequest`, ordered by arrival, the first at 0 s.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO

import msgspec

MOONCAKE_BLOCK_TOKENS = 512
MAX_TOKENS = 2**31 - 1

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace cannot be read; the message says which line and why."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: arrival in seconds after the first, lengths in tokens.

    ``block_ids`` names the blocks of the prompt, in order, where the trace has them: requests that start with the same
    ids share that prefix (Mooncake: 512 tokens a block, the last one may be partial).
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """Read a trace of either kind, by its first line; at most ``limit`` requests. A ``.gz`` file is unpacked.

    Raises :class:`TraceError` for anything that is not a trace, and OSError if the file cannot be opened.
    """
    with _opened(path) as file:
        first = file.readline()
    if first.lstrip().startswith("{"):
        return read_mooncake(path, limit)
    if first.lstrip("\ufeff").startswith(_AZURE_COLUMNS[0]):
        return read_azure(path, limit)
    raise TraceError(f"{path}: neither an Azure CSV ({','.join(_AZURE_COLUMNS)}) nor Mooncake JSON lines")


def read_azure(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """Read an Azure LLM inference trace (CSV)."""

    def requests(file: IO[str]) -> Iterator[TraceRequest]:
        rows = csv.reader(file)
        header = [name.strip().lstrip("\ufeff") for name in next(rows, [])]
        try:
            at = [header.index(name) for name in _AZURE_COLUMNS]
        except ValueError:
            raise TraceError(f"{path}, line 1: columns {','.join(_AZURE_COLUMNS)} are expected") from None
        for row in rows:
            if not row:
                continue
            try:
                time, context, generated = (row[index] for index in at)
                yield TraceRequest(_unix_s(time), int(context), int(generated))
            except (ValueError, IndexError, OverflowError) as error:
                raise TraceError(f"{path}, line {rows.line_num}: {error}") from None

    return _read(path, limit, requests)


def read_mooncake(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """Read a Mooncake trace (JSON lines)."""
    decoder = msgspec.json.Decoder(_MooncakeLine)

    def requests(file: IO[str]) -> Iterator[TraceRequest]:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
            yield TraceRequest(row.timestamp / 1e3, row.input_length, row.output_length, tuple(row.hash_ids))

    return _read(path, limit, requests)


def take(trace: Sequence[TraceRequest], *, start_s: float = 0.0, end_s: float = math.inf) -> list[TraceRequest]:
    """Return the requests that arrive in [start_s, end_s); the first of them then arrives at 0 s."""
    return _from_zero([request for request in trace if start_s <= request.arrival_s < end_s])


def scale_rate(trace: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the trace with ``factor`` times the requests per second: arrivals closer together, in the same order."""
    _positive("factor", factor)
    return [replace(request, arrival_s=request.arrival_s / factor) for request in trace]


def at_rate(trace: Sequence[TraceRequest], requests_per_s: float) -> list[TraceRequest]:
    """Return the trace stretched or squeezed to a mean rate of ``requests_per_s``, its bursts kept.

    The mean rate of n requests is (n − 1) gaps over the time between the first and the last. A trace without any such
    time (one request, or all within a microsecond) is returned as it is.
    """
    _positive("requests_per_s", requests_per_s)
    if len(trace) < 2 or trace[-1].arrival_s - trace[0].arrival_s < 1e-6:
        return list(trace)
    rate = (len(trace) - 1) / (trace[-1].arrival_s - trace[0].arrival_s)
    return scale_rate(trace, requests_per_s / rate)


def poisson(trace: Sequence[TraceRequest], seed: int = 0) -> list[TraceRequest]:
    """Return the requests in their order, arriving as a Poisson process of one a second (see :func:`at_rate`).

    Some traces round arrivals to seconds, so that requests come in heaps, at any rate.
    """
    draw, at_s, arriving = random.Random(seed), 0.0, []
    for request in trace:
        arriving.append(replace(request, arrival_s=at_s))
        at_s += draw.expovariate(1.0)
    return arriving


def scale_lengths(trace: Sequence[TraceRequest], input_factor: float, output_factor: float) -> list[TraceRequest]:
    """Return the trace with lengths multiplied and rounded, at least one token each.

    Block ids no longer fit a prompt of another length and are dropped, unless ``input_factor`` is 1.
    """
    _positive("input_factor", input_factor)
    _positive("output_factor", output_factor)
    return [
        replace(
            request,
            input_tokens=max(1, round(request.input_tokens * input_factor)),
            output_tokens=max(1, round(request.output_tokens * output_factor)),
            block_ids=request.block_ids if input_factor == 1.0 else (),
        )
        for request in trace
    ]


def cap_lengths(
    trace: Sequence[TraceRequest], *, input_tokens: int, output_tokens: int, block_tokens: int = MOONCAKE_BLOCK_TOKENS
) -> list[TraceRequest]:
    """Return the trace with longer prompts and answers cut to the caps; block ids are cut with the prompt."""
    _positive("input_tokens", input_tokens)
    _positive("output_tokens", output_tokens)
    _positive("block_tokens", block_tokens)
    capped = []
    for request in trace:
        kept = min(request.input_tokens, input_tokens)
        capped.append(
            replace(
                request,
                input_tokens=kept,
                output_tokens=min(request.output_tokens, output_tokens),
                block_ids=request.block_ids[: math.ceil(kept / block_tokens)],
            )
        )
    return capped


def _read(
    path: str | os.PathLike[str], limit: int | None, requests: Callable[[IO[str]], Iterator[TraceRequest]]
) -> list[TraceRequest]:
    if limit is not None and limit < 1:
        raise TraceError(f"a limit of {limit} requests")
    try:
        with _opened(path) as file:
            trace = list(itertools.islice(requests(file), limit))
    except (UnicodeDecodeError, csv.Error, EOFError) as error:
        raise TraceError(f"{path}: {error}") from None
    if not trace:
        raise TraceError(f"{path}: no requests")
    for index, request in enumerate(trace):
        if not (math.isfinite(request.arrival_s) and 0 <= request.input_tokens <= MAX_TOKENS):
            raise TraceError(f"{path}, request {index}: {request.arrival_s} s, {request.input_tokens} input tokens")
        if not 0 <= request.output_tokens <= MAX_TOKENS:
            raise TraceError(f"{path}, request {index}: {request.output_tokens} output tokens")
    return _from_zero(sorted(trace, key=lambda request: request.arrival_s))


def _from_zero(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    start_s = trace[0].arrival_s if trace else 0.0
    return [replace(request, arrival_s=request.arrival_s - start_s) for request in trace]


def _unix_s(text: str) -> float:
    # 100 ns digits: datetime reads six of the seven, and the rest is below what a replay can time.
    day, _, fraction = text.strip().partition(".")
    fraction, zone = (fraction[:-6], fraction[-6:]) if fraction[-6:-5] in ("+", "-") else (fraction, "+00:00")
    return datetime.fromisoformat(f"{day}.{(fraction + '000000')[:6]}{zone}").timestamp()


def _positive(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} is {value}; a positive number is expected")


def _opened(path: str | os.PathLike[str]) -> IO[str]:
    if Path(path).suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path, "rb"), encoding="utf-8")
    return open(path, encoding="utf-8", newline="")
