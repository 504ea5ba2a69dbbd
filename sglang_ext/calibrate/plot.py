"""Draws a calibrated profile: compute and bandwidth over TPCs, beside what each would be if it grew in proportion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from learner.device import DeviceProfile
from learner.plots import SERIES, new_plot
from sglang_ext.calibrate.curve import Timed

SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = {"whole device": "s", "planner's decode side": "o", "planner's prefill side": "^", "small": "v"}


def draw(profile: DeviceProfile, timed: Sequence[Timed], path: Path) -> None:
    """Write the figure; the suffix of ``path`` (one of SUFFIXES) says in which format. Raises OSError."""
    plot, axes = new_plot(columns=2, width=10.0, height=4.4)
    plot.suptitle(f"{profile.name}, {profile.provenance.get('measured', '')}", fontsize=11)
    parts: tuple[tuple[str, float, Callable[[Timed], float | None]], ...] = (
        ("bf16 GEMM, TFLOP/s", 1e12, lambda one: one.flops),
        ("read bandwidth, GB/s", 1e9, lambda one: one.bandwidth),
    )
    for axis, (label, unit, rate), points in zip(axes, parts, (profile.flops, profile.bandwidth), strict=True):
        whole = points[-1][1] / unit
        axis.plot([0, profile.tpcs], [0, whole], "--", color=SERIES[4], linewidth=1.0, label="in proportion to TPCs")
        axis.plot([s for s, _ in points], [r / unit for _, r in points], color=SERIES[0], label="profile")
        for at, side in enumerate(dict.fromkeys(one.side for one in timed)):
            measured = [(one.count, rate(one)) for one in timed if one.side == side]
            seen = [(count, value / unit) for count, value in measured if value is not None]
            if seen:
                axis.scatter(
                    [count for count, _ in seen],
                    [value for _, value in seen],
                    marker=_MARKERS.get(side, "D"),
                    color=SERIES[1 + at % (len(SERIES) - 1)],
                    s=26,
                    zorder=3,
                    label=side,
                )
        axis.set(xlabel="TPCs", ylabel=label, xlim=(0, None), ylim=(0, None))
    axes[0].legend(loc="upper left", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.savefig(path, dpi=150)
