"""One schema for what an iteration was asked, what it decided and what it took.

The same structs serve ZMQ (msgpack), the record file (one JSON object a line, a :class:`Header` first) and replay.
"""

from __future__ import annotations

import msgspec

from learner.device import DeviceProfile
from learner.shape import ModelShape

SCHEMA = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """First line of a record file and first message of a scheduler: what all its iterations have in common."""

    schema: int = SCHEMA
    created_unix_s: float
    model: ModelShape
    device: DeviceProfile
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    tp: int = 1
    xp: int = 1
    mode: str = "auto"
    tbt_slo_s: float = 0.1
    ttft_slo_s: float = 2.0
    versions: dict[str, str] = {}

    @property
    def key(self) -> str:
        """What a learnt model belongs to: (device, model, dtypes, TP, XP)."""
        return "|".join((self.device.name, self.model.name, self.dtype, self.kv_dtype, f"tp{self.tp}", f"xp{self.xp}"))


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """Every plan that was weighed, as columns of equal length. Times are of the whole iteration, in seconds."""

    mode: list[str]
    prefill_tokens: list[int]
    prefill_tpcs: list[int]
    decode_tpcs: list[int]
    look_ahead_steps: list[int]
    predicted_s: list[float]
    upper_s: list[float]
    roofline_s: list[float]
    largest_gap_s: list[float]
    tokens_per_s: list[float]
    feasible: list[bool]


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one stream ran: a prefill, ``len(step_end_s)`` decode steps of one batch, or a mixed batch.

    ``q`` and ``c`` hold new and cached tokens per request at the first step; step j of a look-ahead decode has
    ``c + j``. ``step_start_s`` and ``step_end_s`` run from launch to sampled tokens (GPU events; wall clock on a CPU),
    in seconds after the iteration's ``time_s``. Predictions are for each step. ``launch_s`` is how long launching each
    kept the host: 0 where launching is running, empty where it was not recorded.
    """

    phase: str
    tpcs: int
    q: list[int]
    c: list[int]
    logits_rows: int
    step_start_s: list[float]
    step_end_s: list[float]
    predicted_s: list[float]
    upper_s: list[float]
    roofline_s: list[float]
    launch_s: list[float] = []


class Iteration(msgspec.Struct, frozen=True, kw_only=True, tag="iteration"):
    """One scheduler iteration: inputs, candidates, decision and measurement.

    ``mode`` is what was executed: ``temporal``, ``chunked``, ``spatial`` or ``reserved``. ``reason`` says why
    (``fits``, ``best``, ``least_violation``, ``forced``, ``explore``, or ``fallback:<reason>``). ``concurrent`` is
    true when the streams ran at the same time. ``host_overhead_s`` is the exposed time between the previous forward's
    end and this one's launch (0 after idling). ``model_version`` is the learnt snapshot's version, 0 for the roofline.
    """

    schema: int = SCHEMA
    iteration: int
    time_s: float
    mode: str
    reason: str
    tbt_slo_s: float
    model_version: int
    running: int
    waiting: int
    concurrent: bool
    host_overhead_s: float
    candidates: Candidates | None
    decision: int
    streams: list[StreamRecord]
