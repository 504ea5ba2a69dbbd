"""What a forward costs more because another stream runs beside it, as explicit terms.

Decode steps and prefills suffer in different ways, so each has terms of its own: a step's many short kernels wait for
the blocks of a prefill that they cannot preempt; a prefill's few long ones lose TPCs and bandwidth.

The other stream disturbs only while it keeps the device busy. Decode steps do all the time: they are CUDA graphs. A
prefill is launched kernel by kernel, layer by layer, and a short one leaves the device waiting for the host: it is
busy for t of t + launching it, t being its F / Π(S), and all but the first term of what runs beside it count so much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from learner.columns import COLUMN
from learner.device import DeviceProfile
from learner.shape import ModelShape

FloatArray = npt.NDArray[np.float64]

_COSTS = (
    "compute_s",  # own F / Π(S)
    "memory_s",  # own B / 𝓑(S)
    "bandwidth_s",  # own B / 𝓑(S) · the share of the device's bandwidth that the other stream asks for
    "shared_compute_s",  # where both hold some TPC: own F / Π(the TPCs that the other does not hold)
    "shared_memory_s",  # likewise B / 𝓑
)
CONTENTION_COLUMNS = (
    "beside_forward",  # 1 beside another stream
    *(f"decode_{cost}" for cost in _COSTS),  # of a decode step
    *(f"prefill_{cost}" for cost in _COSTS),  # of a forward with any prefill
)
CONTENTION_TERMS = len(CONTENTION_COLUMNS)
BESIDE = CONTENTION_COLUMNS.index("beside_forward")
DECODE_COSTS, PREFILL_COSTS = slice(1, 1 + len(_COSTS)), slice(1 + len(_COSTS), CONTENTION_TERMS)
"""Where in them those of either kind of forward are; both in the same order, which :class:`Costs` names."""

# A stream that holds no TPC of its own still gets some of the shared ones.
_LEAST_EXCLUSIVE_SHARE = 0.125

# Launching an eager forward, per layer: an H200's host took 25 to 36 ms for 36 layers.
_LAUNCH_S_PER_LAYER = 1e-3

# What the terms are made from, of either stream.
_USED = (
    "forward",
    "compute_s",
    "memory_s",
    "compute_whole_s",
    "memory_whole_s",
    "bandwidth_demand",
    "prefill_forward",
)
_USED_COLUMNS = np.array([COLUMN[name] for name in _USED])
_FORWARD, _COMPUTE, _MEMORY, _COMPUTE_WHOLE, _MEMORY_WHOLE, _DEMAND, _PREFILL = range(len(_USED))


class Costs(NamedTuple):
    """What weighs the terms of one kind of forward."""

    compute: float
    memory: float
    bandwidth: float
    shared_compute: float
    shared_memory: float


class Contention:
    """Contention terms of pairs of streams of one model on one device."""

    def __init__(self, shape: ModelShape, profile: DeviceProfile) -> None:
        self.launch_s = _LAUNCH_S_PER_LAYER * shape.layers
        """What launching an eager forward takes."""
        self._tpcs = float(profile.tpcs)
        # By S: how many times longer F and B take on S TPCs than on the whole device.
        s = np.maximum(np.arange(profile.tpcs + 1.0), _LEAST_EXCLUSIVE_SHARE * profile.tpcs)
        flops, bandwidth = profile.flops_at(s), profile.bandwidth_at(s)
        self._slowdown = np.stack([flops[-1] / flops, bandwidth[-1] / bandwidth])

    @staticmethod
    def used(columns: FloatArray) -> FloatArray:
        """Those columns of :class:`learner.roofline.Roofline` [columns, m] that contention depends on [used, m]."""
        return columns.take(_USED_COLUMNS, axis=0)

    def columns(self, own: FloatArray, own_tpcs: FloatArray, beside: FloatArray, beside_tpcs: FloatArray) -> FloatArray:
        """All of :data:`CONTENTION_COLUMNS` for m pairs, as [CONTENTION_TERMS, m]; 0 where either stream is empty.

        ``own``, ``beside``: what :meth:`used` picks of either, [used, m or 1]; TPCs are [m or 1]. Every column is
        non-increasing in ``own_tpcs`` while the two sets of TPCs stay disjoint, and again while they overlap; where
        they start to overlap the shared columns set in.
        """
        busy = 1.0 - beside[_PREFILL] * self.launch_s / (beside[_COMPUTE] + self.launch_s)
        out = np.zeros((CONTENTION_TERMS, max(own_tpcs.size, beside_tpcs.size)))
        both = np.multiply(own[_FORWARD], beside[_FORWARD], out=out[0]) * busy
        costs, of_prefills = out[DECODE_COSTS], out[PREFILL_COSTS]
        np.multiply(own[_COMPUTE : _MEMORY + 1], both, out=costs[:2])
        np.multiply(costs[1], beside[_DEMAND], out=costs[2])
        np.multiply(own[_COMPUTE_WHOLE : _MEMORY_WHOLE + 1], both * self.sharing(own_tpcs, beside_tpcs), out=costs[3:])
        np.multiply(costs, own[_PREFILL], out=of_prefills)
        costs -= of_prefills
        return out

    def sharing(self, own_tpcs: FloatArray, beside_tpcs: FloatArray) -> FloatArray:
        """How many times longer F and B of the whole device take on what the other stream leaves; 0 where the two share
        no TPC; [2, m]."""
        exclusive = self._tpcs - beside_tpcs
        slowdown: FloatArray = self._slowdown.take(exclusive.astype(np.intp), axis=1, mode="clip")
        return slowdown * (own_tpcs > exclusive)
