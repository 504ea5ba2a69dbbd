"""Which sets of TPCs are measured: those that serving will use, a few small ones, and the whole device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_ext.sm.planner import PartitionPlanner

Side = Literal["whole device", "planner's decode side", "planner's prefill side", "small", "asked for", "green context"]

SMALL = (2, 4)  # below the planner's least level, where they can be planned: what a curve is anchored by
QUICK_LEVELS = 3


@dataclass(frozen=True, slots=True)
class TpcSet:
    """``count`` TPCs to measure as one partition.

    ``tpcs``: their logical ids, for a stream mask. ``green_sms``: SMs to split off for a green context, which chooses
    the TPCs itself. Neither: all of the device, nothing set.
    """

    side: Side
    count: int
    tpcs: tuple[int, ...] = ()
    green_sms: int = 0


def masked_sets(planner: PartitionPlanner, counts: Sequence[int] = (), *, quick: bool = False) -> list[TpcSet]:
    """The whole device first, then sets from large to small, each safe for clusters; the same set once only.

    ``counts``: these TPC counts in place of the planner's levels. Raises ValueError for one that cannot be planned.
    """
    total = planner.topology.tpcs
    found = [TpcSet("whole device", total)]
    if counts:
        for count in counts:
            if count != total:
                found.append(TpcSet("asked for", count, _decode_side(planner, count)))
    else:
        levels = thinned(planner.levels, QUICK_LEVELS) if quick else planner.levels
        for level in levels:
            split = planner.split(level)
            found.append(TpcSet("planner's decode side", level, split.decode))
            found.append(TpcSet("planner's prefill side", len(split.prefill), split.prefill))
        for count in SMALL:
            small = None if quick or count in planner.levels else planner.plan(count)
            if small is not None:
                found.append(TpcSet("small", count, small.decode))
    return _ordered(found)


def green_sets(
    total: int, granularity: tuple[int, int], counts: Sequence[int] = (), *, quick: bool = False
) -> list[TpcSet]:
    """Sets that green contexts can make: ``granularity`` is (least SMs, multiple of SMs), ``total`` in TPCs.

    ``counts`` are rounded to what can be made. Raises ValueError for one that has no partition of its size or less.
    """
    least, multiple = (-(-sms // 2) for sms in granularity)
    step = max(multiple, 1)
    possible = [tpcs for tpcs in range(max(least, step), total, step) if tpcs % step == 0]
    found = [TpcSet("whole device", total)]
    if counts:
        for count in counts:
            fitting = [tpcs for tpcs in possible if tpcs <= count]
            if count != total and not fitting:
                raise ValueError(
                    f"green contexts here have at least {max(least, step)} TPCs and fewer than {total}, not {count}"
                )
            if count != total:
                found.append(TpcSet("asked for", fitting[-1], green_sms=2 * fitting[-1]))
    else:
        for tpcs in thinned(possible, QUICK_LEVELS if quick else 12):
            found.append(TpcSet("green context", tpcs, green_sms=2 * tpcs))
    return _ordered(found)


def thinned(values: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of ``values``, evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def _decode_side(planner: PartitionPlanner, count: int) -> tuple[int, ...]:
    total = planner.topology.tpcs
    split = planner.plan(count) if 0 < count < total else None
    if split is None:
        raise ValueError(
            f"{count} TPCs cannot be measured: this device has {total}, and a set with room for thread-block clusters "
            f"takes at least {planner.min_per_gpc} of a GPC; kernels launched in clusters would hang on a smaller one"
        )
    return split.decode


def _ordered(sets: list[TpcSet]) -> list[TpcSet]:
    distinct = {(one.count, one.tpcs, one.green_sms): one for one in reversed(sets)}
    return sorted(distinct.values(), key=lambda one: (-one.count, one.side, one.tpcs))
