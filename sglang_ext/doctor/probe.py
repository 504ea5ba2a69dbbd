"""Asks PyTorch or the driver what there is. Run by the doctor as a process of its own: a sick driver may crash or hang.

``python -m sglang_ext.doctor.probe torch`` imports PyTorch and reports what it sees; ``… driver JSON`` opens libcuda
and reports driver, GPUs, GPC map and the ways of SM control. One JSON object per line, each with its ``step``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

SLOT_SEARCH_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """What the driver part is to do: for which GPU, by which libcuda, where a server keeps its state.

    ``topology``: launch clusters to map the GPCs. ``slot``: find and verify the place of a stream's mask.
    ``self_test``: try each way of control as a server does at its start. With none of them the GPU is not opened.
    """

    ordinal: int
    libcuda: str
    state_dir: str
    topology: bool = False
    slot: bool = False
    self_test: bool = False

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def say(step: str, **message: Any) -> None:
    print(json.dumps({"step": step, **message}), flush=True)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.ERROR)
    if argv[:1] == ["torch"]:
        probe_torch()
    elif argv[:1] == ["driver"] and len(argv) == 2:
        probe_driver(Orders(**json.loads(argv[1])))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


def probe_torch() -> None:
    """Step ``torch``: version, CUDA, threads, GPUs as far as PyTorch sees them, and which reach each other's memory."""
    import torch

    gpus, peers = [], []
    if torch.cuda.is_available():
        for ordinal in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(ordinal)
            peers += [[ordinal, other] for other in range(ordinal) if torch.cuda.can_device_access_peer(ordinal, other)]
            gpus.append(
                {
                    "ordinal": ordinal,
                    "name": gpu.name,
                    "memory_bytes": gpu.total_memory,
                    "sms": gpu.multi_processor_count,
                    "compute_capability": f"{gpu.major}.{gpu.minor}",
                }
            )
    about = {"version": str(torch.__version__), "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    say("torch", **about, gpus=gpus, peers=peers)


def probe_driver(orders: Orders) -> None:
    """Step ``driver``, then for the GPU in question ``gpu``, ``green``, ``gpcs``, ``slot`` and ``way`` (each way)."""
    import conflux_native

    try:
        driver = conflux_native.Driver(orders.libcuda)
    except (conflux_native.DriverMissing, conflux_native.CudaError) as error:
        say("driver", error=_one_line(error))
        return
    say("driver", library=driver.path, cuda_version=driver.version, gpus=driver.device_count)
    if not (orders.topology or orders.slot or orders.self_test) or orders.ordinal >= driver.device_count:
        return  # opening a GPU takes memory on it, and a busy one may have none left
    try:
        device = conflux_native.Device(driver, orders.ordinal)
    except (RuntimeError, ValueError) as error:
        say("gpu", error=_one_line(error))
        return
    major, minor = device.compute_capability
    say(
        "gpu",
        ordinal=orders.ordinal,
        name=device.name,
        memory_bytes=device.total_memory_bytes,
        sms=device.sm_count,
        compute_capability=f"{major}.{minor}",
    )
    _green(device)
    if orders.topology:
        _gpcs(device)
    if orders.slot:
        _slot(orders)
    if orders.self_test:
        _self_test(orders)


def _green(device: Any) -> None:
    """Step ``green``: what green contexts can split off, in SMs."""
    import conflux_native

    try:
        granularity = conflux_native.green_granularity(device)
    except (RuntimeError, ValueError) as error:
        say("green", error=_one_line(error))
        return
    if granularity is None:
        say("green", error="this driver has no green contexts: they came with CUDA 12.4")
    else:
        say("green", least_sms=granularity[0], multiple_sms=granularity[1])


def _gpcs(device: Any) -> None:
    """Step ``gpcs``: which TPCs share a GPC, and which host clusters."""
    from conflux_native.measure import measure_topology

    try:
        topology = measure_topology(device)
    except (RuntimeError, ValueError, TimeoutError) as error:
        say("gpcs", error=_one_line(error))
        return
    say("gpcs", topology=topology.to_dict())


def _slot(orders: Orders) -> None:
    """Step ``slot``: the offset of a stream's mask, verified in processes of its own."""
    from conflux_native.search import find_slot

    try:
        found = find_slot(
            orders.ordinal,
            driver_path=orders.libcuda,
            timeout_s=SLOT_SEARCH_S,
            remembered_dir=Path(orders.state_dir) / "sm",  # where a server remembers it too
        )
    except (RuntimeError, ValueError, OSError) as error:
        say("slot", error=_one_line(error))
        return
    say("slot", offset=found.offset, how=found.how)


def _self_test(orders: Orders) -> None:
    """Step ``way`` for each way of control: whether it passes the test of a server's start."""
    from sglang_ext.sm.select import WAYS, choose

    for kind in WAYS:
        chosen = choose(kind, orders.ordinal, orders.state_dir)
        control = chosen.control
        passed = control.kind == kind
        levels = list(control.levels) if passed else []
        control.close()
        say("way", kind=kind, passed=passed, levels=levels, reason=chosen.reasons.get(kind, ""))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
