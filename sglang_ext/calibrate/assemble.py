"""From what was measured to a device profile with its provenance. Pure, but for the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

from learner.device import DeviceProfile
from sglang_ext.calibrate.curve import Timed, points
from sglang_ext.calibrate.run import CalibrationError, Measured, Plan
from sglang_ext.device import CALIBRATED, PCIE_BANDWIDTH, TIME_FORMAT
from sglang_ext.doctor.gather import driver_version

WAYS = {
    "smctrl": "streams masked to that many TPCs",
    "green": "green contexts of that many TPCs",
    "none": "the whole device alone",
}


def gpu_profile(plan: Plan, measured: Measured, shipped: DeviceProfile | None) -> DeviceProfile:
    """The profile of the GPU. ``shipped``: one for this model, for a link that could not be measured.

    Raises CalibrationError if the whole device could not be measured.
    """
    timed = list(measured.timed.values())
    total = int(measured.gpu["sms"]) // 2
    try:
        flops = points(((one.count, one.flops) for one in timed), total)
        bandwidth = points(((one.count, one.bandwidth) for one in timed), total)
    except ValueError as error:
        whole = next((one.failure for one in timed if one.count == total), "")
        raise CalibrationError(f"{error}: {whole or 'no timing of it can be used'}") from error
    link, link_method = _link(measured, shipped)
    shapes = ", ".join("x".join(map(str, shape)) for shape in plan.work.shapes)
    provenance = {
        "source": CALIBRATED,
        "measured": time.strftime(TIME_FORMAT, time.gmtime()),
        "driver": _driver(plan),
        "torch": f"{measured.gpu['torch']}, CUDA {measured.gpu['cuda']}",
        "flops": f"bf16 GEMMs m x k x n of {shapes}: the best shape, median of {plan.work.repeats}; {WAYS[plan.way]}",
        "bandwidth": f"{timed[0].read_bytes / 2**30:.3g} GiB read by {measured.gpu['reads_by']}, "
        f"median of {plan.work.repeats}",
        "tpc_sets": sets_text(timed),
        "link_bandwidth": link_method,
    }
    failed = sorted({f"{one.count} TPCs ({one.side}): {one.failure}" for one in timed if one.failure})
    if failed:
        provenance["skipped"] = "; ".join(failed)
    return DeviceProfile(
        name=measured.gpu["name"],
        tpcs=total,
        flops=flops,
        bandwidth=bandwidth,
        link_bandwidth=link,
        provenance=provenance,
    )


def sets_text(timed: Sequence[Timed]) -> str:
    """As ``planner's decode side 8 12; whole device 66``: the sets that were measured."""
    by_side: dict[str, list[int]] = {}
    for one in timed:
        if not one.failure:
            by_side.setdefault(one.side, []).append(one.count)
    return "; ".join(f"{side} {' '.join(map(str, sorted(counts)))}" for side, counts in sorted(by_side.items()))


def _link(measured: Measured, shipped: DeviceProfile | None) -> tuple[float, str]:
    found = float(measured.link.get("bytes_per_s", 0.0))
    if found > 0.0:
        return found, str(measured.link["method"])
    why = measured.link.get("method", "it was not measured")
    if shipped is not None and shipped.link_bandwidth > 0.0:
        how = shipped.provenance.get("link_bandwidth", "unknown")
        return shipped.link_bandwidth, f"as shipped for {shipped.name} ({how}); here {why}"
    return PCIE_BANDWIDTH, f"assumed: PCIe 4.0 x16; {why}"


def _driver(plan: Plan) -> str:
    version = driver_version(plan.library) or "unknown"
    number = plan.cuda_version
    return version if number is None else f"{version}, CUDA {number // 1000}.{number % 1000 // 10}"
