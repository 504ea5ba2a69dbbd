"""What a device can do with S of its TPCs: compute and read bandwidth, as measured."""

from __future__ import annotations

import math
import os
import tempfile
from functools import lru_cache
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Points = tuple[tuple[float, float], ...]


class Curve:
    """A measured rate as a function of S: linear between points, through the origin below the first one.

    Measurements are noisy, so a later point that lies below an earlier one is raised to it: more TPCs are never
    slower. S is clipped to [1, last point], so the rate is never zero.
    """

    __slots__ = ("_rate", "_tpcs")

    def __init__(self, points: Points) -> None:
        measured = np.array([(0.0, 0.0), *points])
        rate = np.maximum.accumulate(measured[:, 1])
        beyond_one = measured[:, 0] > 1.0
        self._tpcs: FloatArray = np.concatenate([[1.0], measured[beyond_one, 0]])
        self._rate: FloatArray = np.interp(self._tpcs, measured[:, 0], rate)

    def __call__(self, tpcs: npt.ArrayLike) -> FloatArray:
        """Rate per second at ``tpcs``, element by element."""
        # np.interp holds the end values outside of the points.
        return np.asarray(np.interp(np.asarray(tpcs, dtype=np.float64), self._tpcs, self._rate))


@lru_cache(maxsize=64)
def _curve(points: Points) -> Curve:
    return Curve(points)


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Measured curves of one device.

    ``flops`` and ``bandwidth`` are points ``(tpcs, FLOP/s)`` and ``(tpcs, bytes/s)``, ascending in tpcs; the last
    point is the whole device. A device that cannot be partitioned (a CPU) has ``tpcs == 1`` and one point each.
    ``link_bandwidth`` is in bytes/s to a peer, 0 when there is none. ``provenance`` says how each was measured.
    """

    schema: int = 1
    name: str
    tpcs: int
    flops: Points
    bandwidth: Points
    link_bandwidth: float = 0.0
    provenance: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.schema != 1:
            raise ValueError(f"device profile has schema {self.schema}, this program reads 1")
        if not self.name:
            raise ValueError("device profile has no name")
        if self.tpcs < 1:
            raise ValueError(f"tpcs must be at least 1, not {self.tpcs}")
        _check_points("flops", self.flops, self.tpcs)
        _check_points("bandwidth", self.bandwidth, self.tpcs)
        if not (math.isfinite(self.link_bandwidth) and self.link_bandwidth >= 0.0):
            raise ValueError(f"link_bandwidth must be finite and not negative, not {self.link_bandwidth}")

    def flops_at(self, tpcs: npt.ArrayLike) -> FloatArray:
        """Π(S): FLOP/s of ``tpcs`` TPCs, element by element; clipped to [1, self.tpcs], non-decreasing."""
        return _curve(self.flops)(tpcs)

    def bandwidth_at(self, tpcs: npt.ArrayLike) -> FloatArray:
        """𝓑(S): bytes/s that ``tpcs`` TPCs can read, element by element; clipped to [1, self.tpcs], non-decreasing."""
        return _curve(self.bandwidth)(tpcs)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceProfile:
        """Read a JSON file written by :meth:`save`. Raises ValueError naming the file and what is wrong in it."""
        return cls._decode(Path(path).read_bytes(), str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as indented JSON, by renaming a finished file, so that a reader never sees half of one."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def shipped(cls, name: str) -> DeviceProfile:
        """A profile that comes with the package, by its file's stem (``h200``). Raises ValueError if unknown."""
        if name not in shipped_names():
            raise ValueError(f"no shipped profile {name!r}; one of {', '.join(shipped_names())}")
        data = (resources.files("learner") / "profiles" / f"{name}.json").read_bytes()
        return cls._decode(data, f"shipped profile {name}")

    @classmethod
    def _decode(cls, data: bytes, origin: str) -> DeviceProfile:
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{origin}: {error}") from error


def shipped_names() -> list[str]:
    """Stems of the profiles that come with the package, sorted."""
    folder = resources.files("learner") / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def _check_points(field: str, points: Points, tpcs: int) -> None:
    if not points:
        raise ValueError(f"{field} has no points")
    last = 0.0
    for s, rate in points:
        if not (math.isfinite(s) and s > last):
            raise ValueError(f"{field}: TPC counts must be positive and ascending, got {s} after {last}")
        if not (math.isfinite(rate) and rate > 0.0):
            raise ValueError(f"{field}: the rate at {s} TPCs must be positive and finite, not {rate}")
        last = s
    if last != tpcs:
        raise ValueError(f"{field}: the last point is at {last} TPCs, but the device has {tpcs}")
