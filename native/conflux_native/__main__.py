"""What this machine's driver and GPU allow: ``python -m conflux_native``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from conflux_native import AVAILABLE, WHY_NOT
from conflux_native.topology import ranges, tpc_count


def _parse(line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conflux_native",
        description="Shows the NVIDIA driver, the GPU, where the driver keeps a stream's SM mask (found and verified "
        "in a child process, then remembered), and which TPCs share a GPC. Exit status 1 if streams cannot be masked.",
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the GPU, as CUDA counts them (default: 0)")
    parser.add_argument("--driver", default="libcuda.so.1", metavar="PATH", help="the driver's library")
    parser.add_argument("--fresh", action="store_true", help="forget what is remembered and look again")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for the search (default: 120)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser.parse_args(line)


def facts(ordinal: int, driver_path: str, timeout_s: float, fresh: bool) -> dict[str, Any]:
    """Everything that is shown, in JSON's types. Raises RuntimeError or ValueError without such a GPU."""
    from conflux_native import Device, Driver
    from conflux_native.measure import measure_topology
    from conflux_native.remembered import default_dir, forget
    from conflux_native.search import KIND, NotFound, cuda_name, find_slot, key_of

    driver = Driver(driver_path)
    if fresh:
        forget(default_dir(), KIND, key_of(driver, Device(driver, ordinal)))
    mask: dict[str, Any]
    try:
        found = find_slot(ordinal, driver_path=driver_path, timeout_s=timeout_s)
        mask = {"offset": found.offset, "how": found.how, "tried": len(found.tried), "seconds": round(found.seconds, 3)}
    except NotFound as error:
        mask = {"offset": None, "reason": error.reason, "tried": len(error.tried)}
    # Not before: a GPU in exclusive-process mode would refuse the search's child.
    device = Device(driver, ordinal)
    return {
        "driver": {"path": driver.path, "cuda": cuda_name(driver.version)},
        "gpu": {
            "ordinal": ordinal,
            "name": device.name,
            "uuid": device.uuid,
            "compute_capability": ".".join(map(str, device.compute_capability)),
            "sms": device.sm_count,
            "tpcs": tpc_count(device.sm_count),
            "memory_bytes": device.total_memory_bytes,
        },
        "mask": mask,
        "topology": measure_topology(device).to_dict(),
    }


def render(shown: dict[str, Any]) -> str:
    """The same for a person."""
    gpu, mask, topology = shown["gpu"], shown["mask"], shown["topology"]
    lines = [
        f"driver    {shown['driver']['path']}, CUDA {shown['driver']['cuda']}",
        f"GPU {gpu['ordinal']:<6}{gpu['name']}: {gpu['sms']} SMs in {gpu['tpcs']} TPCs, compute capability "
        f"{gpu['compute_capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB",
    ]
    if mask["offset"] is None:
        lines.append(f"SM mask   {mask['reason']}")
    else:
        tried = f", {mask['tried']} tried in {mask['seconds']:.1f} s" if mask["tried"] else ""
        lines.append(f"SM mask   at offset {mask['offset']:#x} of a stream ({mask['how']}{tried}), verified")
    for name, tpcs in zip(["GPCs"] + [""] * len(topology["gpcs"]), topology["gpcs"], strict=False):
        lines.append(f"{name:<10}TPCs {ranges(tpcs)}")
    for size, tpcs in topology["hosts"].items():
        lines.append(f"clusters  of {size} blocks fit on the TPCs {ranges(tpcs)}")
    return "\n".join(lines)


def main(line: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parse(line)
    try:
        if not AVAILABLE:
            raise RuntimeError(WHY_NOT)
        shown = facts(options.device, options.driver, options.timeout, options.fresh)
    except (RuntimeError, ValueError, TimeoutError) as error:
        print(json.dumps({"error": str(error)}) if options.json else f"conflux_native: {error}")
        return 1
    print(json.dumps(shown, indent=1) if options.json else render(shown))
    return 0 if shown["mask"]["offset"] is not None else 1


if __name__ == "__main__":
    sys.exit(main())
