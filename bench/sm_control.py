"""Does SM control hold what it says? (``python -m bench.sm_control --output FILE``)

Every single-TPC mask and random planned splits against %smid, what a change of mask costs, two compute-bound kernels on
disjoint sets against each alone, the search for an unknown offset, and green contexts by the same checks. Needs an
NVIDIA GPU; no torch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine_facts import machine_facts

SPLITS = 1000
GREEN_SMS = (16, 32, 64, 96)
SPIN_MS = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--splits", type=int, default=SPLITS, help=f"random splits to verify (default: {SPLITS})")
    arguments = parser.parse_args()
    import conflux_native as native

    try:
        device = native.Device(native.Driver())
    except (ImportError, RuntimeError) as error:
        parser.error(str(error))
    results: dict[str, Any] = {"command": "python -m bench.sm_control", "machine": machine_facts()}
    failed = []
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "search": search,
        "masks": lambda: masks(device, arguments.splits),
        "green": lambda: green(device),
    }
    for name, run in parts.items():
        begin_s = time.perf_counter()
        try:
            results[name] = run()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            failed.append(name)
        results[name]["seconds"] = round(time.perf_counter() - begin_s, 2)
        print(name, json.dumps(results[name]), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


def search() -> dict[str, Any]:
    """The offset without the table of known drivers, in children: near guesses that are wrong, then a whole scan."""
    from conflux_native.search import find_slot

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in {
            "known": {},
            "wrong_first": {"offsets": [0x4CC, 0x4E4, 0x4FC, 0x5FC, 0x500, 0x600, 0x51C]},
            "whole_range": {"skip_known": True},
        }.items():
            begin_s = time.perf_counter()
            result = find_slot(0, remembered_dir=Path(folder) / name, **options)
            found[name] = {
                "offset": hex(result.offset),
                "how": result.how,
                "tried": result.tried if isinstance(result.tried, int) else len(result.tried),
                "seconds": round(time.perf_counter() - begin_s, 2),
            }
    return found


def masks(device: Any, splits: int) -> dict[str, Any]:
    from conflux_native import Mask, MaskSlot
    from conflux_native.measure import measure_topology
    from conflux_native.search import find_slot
    from sglang_ext.sm.planner import PartitionPlanner

    slot = MaskSlot(find_slot(0).offset)
    total = device.sm_count // 2
    one, other = device.create_stream(-1), device.create_stream(0)

    def verify(stream: int, tpcs: Any) -> None:
        slot.apply(stream, Mask(tpcs))
        seen = {sm // 2 for sm, blocks in enumerate(device.smid_histogram(stream)) if blocks}
        if seen != set(tpcs):
            raise RuntimeError(f"a mask of TPCs {sorted(tpcs)} ran on {sorted(seen)}")

    for tpc in range(total):
        verify(one, [tpc])
    topology = measure_topology(device)
    planners = [PartitionPlanner(topology), *(PartitionPlanner(topology, min_per_gpc=least) for least in (2, 3))]
    rng = random.Random(0)
    for _ in range(splits):
        plan = None
        while plan is None:
            plan = rng.choice(planners).plan(rng.randrange(1, total))
        verify(one, plan.decode)
        verify(other, plan.prefill)
    split = planners[0].split(planners[0].nearest(24))
    a, b = Mask(split.decode), Mask(split.prefill)
    calls = 200_000
    apply_s = min(timeit.repeat(lambda: slot.apply(one, a), number=calls, repeat=3)) / calls
    empty_s = min(timeit.repeat(lambda: None, number=calls, repeat=3)) / calls
    slot.apply(one, a)
    slot.apply(other, b)
    return {
        "single_tpc_masks_verified": total,
        "planned_splits_verified": splits,
        "gpcs": [list(gpc) for gpc in topology.gpcs],
        "hosts": {str(size): len(tpcs) for size, tpcs in topology.hosts.items()},
        "levels": list(planners[0].levels),
        "change_ns": round(slot.cost_ns(one, b, a, 1_000_000), 1),
        "change_from_python_ns": round((apply_s - empty_s) * 1e9, 1),
        "two_streams": together(device, one, 2 * len(split.decode), other, 2 * len(split.prefill)),
    }


def together(device: Any, one: int, one_sms: int, other: int, other_sms: int) -> dict[str, Any]:
    """Times of two compute-bound kernels, each alone and both at once, in milliseconds; medians of seven."""

    def spin(stream: int, sms: int, iterations: int) -> Callable[[], None]:
        return lambda: device.launch_spin(stream, iterations, 8 * sms)

    iterations = 10_000
    first = device.elapsed_ms(one, spin(one, one_sms, iterations), 10.0)
    iterations = max(int(iterations * SPIN_MS / first), 1)
    a, b = spin(one, one_sms, iterations), spin(other, other_sms, iterations)
    alone_a = [device.elapsed_ms(one, a, 10.0) for _ in range(7)]
    alone_b = [device.elapsed_ms(other, b, 10.0) for _ in range(7)]
    both_a, both_b = [], []
    for _ in range(7):
        # The other stream's kernels begin before and end after the one that is timed.
        for _ in range(3):
            b()
        both_a.append(device.elapsed_ms(one, a, 10.0))
        device.synchronize(other, 10.0)
        for _ in range(3):
            a()
        both_b.append(device.elapsed_ms(other, b, 10.0))
        device.synchronize(one, 10.0)
    times: dict[str, Any] = {
        name: round(statistics.median(values), 4)
        for name, values in {"one": alone_a, "other": alone_b, "one_beside": both_a, "other_beside": both_b}.items()
    }
    times["one_ratio"] = round(times["one_beside"] / times["one"], 4)
    times["other_ratio"] = round(times["other_beside"] / times["other"], 4)
    return times


def green(device: Any) -> dict[str, Any]:
    from conflux_native import GreenPartition, green_granularity

    granularity = green_granularity(device)
    if granularity is None:
        raise RuntimeError("this driver has no green contexts")
    checked = []
    for sms in GREEN_SMS:
        begin_s = time.perf_counter()
        partition = GreenPartition(device, sms)
        created_ms = (time.perf_counter() - begin_s) * 1e3
        one, other = partition.create_stream(0, -1), partition.create_stream(1, 0)
        seen = [{sm for sm, blocks in enumerate(device.smid_histogram(stream)) if blocks} for stream in (one, other)]
        if seen[0] & seen[1] or [len(part) for part in seen] != list(partition.sm_counts):
            raise RuntimeError(f"{partition.sm_counts} SMs were asked for, {[len(part) for part in seen]} seen")
        checked.append(
            {
                "asked": sms,
                "sm_counts": list(partition.sm_counts),
                "created_ms": round(created_ms, 2),
                "two_streams": together(device, one, len(seen[0]), other, len(seen[1])),
            }
        )
        partition.destroy()
    return {"granularity": list(granularity), "partitions": checked}


if __name__ == "__main__":
    sys.exit(main())
