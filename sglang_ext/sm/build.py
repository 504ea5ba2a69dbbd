"""Makes controls out of what the native package found: the same way in the self-test and in the serving process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_ext.sm.green import GreenControl, green_levels
from sglang_ext.sm.planner import MIN_PER_GPC, PartitionPlanner
from sglang_ext.sm.smctrl import SmctrlControl

if TYPE_CHECKING:
    from conflux_native.topology import Topology


class NoLevelError(RuntimeError):
    """This GPU cannot be divided safely in this way."""


def plan_smctrl(topology: Topology, only: int | None = None, *, clusters: bool = True) -> PartitionPlanner:
    """The planner for a device; ``clusters``: whether the chip has any. Raises NoLevelError if it has no level."""
    planner = PartitionPlanner(topology, MIN_PER_GPC if clusters else 1, only=only)
    if not planner.levels:
        raise NoLevelError(
            f"the {topology.tpcs} TPCs of this GPU cannot be divided so that thread-block clusters fit on both sides"
        )
    return planner


def plan_green(device: Any, only: int | None = None) -> tuple[int, ...]:
    """Levels that green contexts can make. Raises NoLevelError if the driver or the GPU has none."""
    from conflux_native._core import green_granularity

    granularity = green_granularity(device)
    if granularity is None:
        raise NoLevelError("this driver has no green contexts: they came with CUDA 12.4 (driver 550)")
    levels = green_levels(device.sm_count, granularity, only=only)
    if not levels:
        least, multiple = granularity
        raise NoLevelError(
            f"green contexts of this GPU need at least {least} SMs each, in multiples of {multiple}: its "
            f"{device.sm_count} SMs are too few to divide"
        )
    return levels


def smctrl_control(device: Any, offset: int, planner: PartitionPlanner, levels: tuple[int, ...]) -> SmctrlControl:
    """``offset`` must have been verified on this driver and GPU, in another process."""
    from conflux_native._core import MaskSlot

    return SmctrlControl(device, MaskSlot(offset), planner, levels)


def green_control(device: Any, levels: tuple[int, ...]) -> GreenControl:
    return GreenControl(device, levels)
