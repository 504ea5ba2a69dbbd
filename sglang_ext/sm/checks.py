"""What must hold before a level is used: where kernels really run, room for clusters, right results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang_ext.sm.control import Handles, SmControl

if TYPE_CHECKING:
    import torch

CLUSTER_SIZE = 4
"""SMs of the clusters that both sides must have room for: two TPCs of a GPC, what the planner gives at least."""

_BLOCKS_PER_SM = (4, 16, 64)
"""A probe of few blocks may pass an SM over; it is repeated with more before that counts."""

ROWS = (1, 32, 128, 2048)
HIDDEN = 4096
_LARGEST_SUM = 256  # up to here bfloat16 holds every integer


class WrongError(Exception):
    """A stream's kernels ran where they must not, or computed nonsense. The message says which and how."""


def check_sms(device: Any, control: SmControl, tpcs: int, timeout_s: float) -> None:
    """Both streams of a level use exactly their SMs, and these are disjoint: a few probes of about a millisecond.

    Raises WrongError; TimeoutError if a probe does not end, after which the device is of no more use to the process.
    """
    handles = control.handles(tpcs)
    sides = {"decode": (handles.decode, handles.decode_tpcs, handles.decode_ids),
             "prefill": (handles.prefill, handles.prefill_tpcs, handles.prefill_ids)}  # fmt: skip
    used: dict[str, frozenset[int]] = {}
    for side, (stream, count, ids) in sides.items():
        seen = _sms_of(device, stream, 2 * count, timeout_s)
        used[side] = seen
        if ids is not None:
            planned = {sm for tpc in ids for sm in (2 * tpc, 2 * tpc + 1) if sm < device.sm_count}
            if seen != planned:
                raise WrongError(
                    f"{side} on {count} TPCs: kernels ran on SMs outside of the plan ({_some(seen - planned)}) or "
                    f"never on some of it ({_some(planned - seen)})"
                )
        elif len(seen) != 2 * count:
            raise WrongError(f"{side} was given {count} TPCs ({2 * count} SMs), but its kernels ran on {len(seen)} SMs")
    if both := used["decode"] & used["prefill"]:
        raise WrongError(f"decode on {tpcs} TPCs and prefill beside it share the SMs {_some(both)}")


def check_clusters(device: Any, control: SmControl, tpcs: int, timeout_s: float) -> bool:
    """Clusters of :data:`CLUSTER_SIZE` run on both streams. False where the chip has none. Raises like check_sms."""
    if device.compute_capability < (9, 0):
        return False
    handles = control.handles(tpcs)
    for stream in (handles.decode, handles.prefill):
        device.cluster_samples(stream, CLUSTER_SIZE, 4 * device.sm_count // CLUSTER_SIZE, timeout_s)
    return True


class Gemms:
    """bfloat16 GEMMs of [m, 4096] × [4096, 4096] for small and large m, with exactly known results.

    The operands hold −1, 0 and 1, mostly 0, so every partial sum is a small integer that float32 and bfloat16 hold
    exactly: any algorithm on any number of SMs must give the very same numbers.
    """

    def __init__(self, ordinal: int) -> None:
        """Needs torch with CUDA. Raises RuntimeError otherwise."""
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no CUDA device")
        self._torch = torch
        where = torch.device("cuda", ordinal)
        seeded = torch.Generator(where).manual_seed(0)

        def entries(rows: int) -> torch.Tensor:
            drawn = torch.randint(0, 8, (rows, HIDDEN), generator=seeded, device=where)
            return (drawn == 0).to(torch.bfloat16) - (drawn == 1).to(torch.bfloat16)

        self._weight = entries(HIDDEN)
        self._inputs = [entries(rows) for rows in ROWS]
        self._expected = [(x.float() @ self._weight.float().T).to(torch.bfloat16) for x in self._inputs]
        torch.cuda.synchronize(where)
        if max(float(y.abs().max()) for y in self._expected) >= _LARGEST_SUM:
            raise RuntimeError(f"torch {torch.__version__} computes a wrong float32 product on this GPU")
        self._where = where

    def check(self, device: Any, handles: Handles, timeout_s: float) -> None:
        """Run all of them on both streams at once and compare. Raises like :func:`check_sms`."""
        cuda, linear = self._torch.cuda, self._torch.nn.functional.linear
        results: dict[str, list[torch.Tensor]] = {}
        sides = {"decode": handles.decode, "prefill": handles.prefill}
        for side, handle in sides.items():
            with cuda.stream(cuda.ExternalStream(handle, device=self._where)):
                results[side] = [linear(x, self._weight) for x in self._inputs]
        for side, handle in sides.items():
            if not device.synchronize(handle, timeout_s):
                raise TimeoutError(f"GEMMs on the {side} stream did not end within {timeout_s:g} s")
        for side, found in results.items():
            for rows, one, expected in zip(ROWS, found, self._expected, strict=True):
                if not self._torch.equal(one, expected):
                    raise WrongError(f"a bf16 GEMM of {rows} rows on the {side} stream gave wrong numbers")


def _sms_of(device: Any, stream: int, expected: int, timeout_s: float) -> frozenset[int]:
    """SMs that ran blocks of a stream, looked at until there are as many as ``expected``."""
    seen: frozenset[int] = frozenset()
    for blocks in _BLOCKS_PER_SM:
        histogram = device.smid_histogram(stream, timeout_s, blocks)
        seen |= {sm for sm, count in enumerate(histogram) if count}
        if len(seen) >= expected:
            break
    return seen


def _some(sms: Iterable[int], most: int = 8) -> str:
    listed = sorted(sms)
    return (", ".join(map(str, listed[:most])) + (" …" if len(listed) > most else "")) or "none"
