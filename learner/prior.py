"""What a latency model knows before it has learnt anything: coefficients that fitted other records.

A GPU's forwards lie above their roofline by factors and launch times that its kernels and driver bring about, much the
same for all models of one kind. Starting from those of records that were made elsewhere is nearer to the truth than the
bare roofline, and a fit of few samples is drawn towards them.
"""

from __future__ import annotations

from importlib import resources

import msgspec
import numpy as np
import numpy.typing as npt

from learner.columns import TERM_COLUMNS
from learner.contention import CONTENTION_COLUMNS
from learner.device import DeviceProfile
from learner.snapshot import Snapshot

FloatArray = npt.NDArray[np.float64]


class Prior(msgspec.Struct, frozen=True):
    """Coefficients by the names of TERM_COLUMNS and CONTENTION_COLUMNS; those that are not named are 0.

    ``source`` says what records they were fitted to and by what. Raises ValueError for other names and for numbers that
    no snapshot may hold.
    """

    coefficients: dict[str, float]
    contention: dict[str, float]
    source: dict[str, str] = {}

    def __post_init__(self) -> None:
        unknown = {*self.coefficients} - {*TERM_COLUMNS} | {*self.contention} - {*CONTENTION_COLUMNS}
        if unknown:
            raise ValueError(f"a prior has coefficients of unknown terms: {', '.join(sorted(unknown))}")
        self.snapshot().validate()

    @classmethod
    def of(cls, coefficients: FloatArray, contention: FloatArray, source: dict[str, str]) -> Prior:
        """That of a fit: ``coefficients`` [TERMS], ``contention`` [CONTENTION_TERMS]."""
        named = zip(TERM_COLUMNS, coefficients.tolist(), strict=True)
        beside = zip(CONTENTION_COLUMNS, contention.tolist(), strict=True)
        return cls({name: x for name, x in named if x}, {name: x for name, x in beside if x}, source)

    def snapshot(self) -> Snapshot:
        """Version 0 of a model that starts from it."""
        return msgspec.structs.replace(
            Snapshot.roofline(),
            coefficients=[self.coefficients.get(name, 0.0) for name in TERM_COLUMNS],
            contention=[self.contention.get(name, 0.0) for name in CONTENTION_COLUMNS],
        )


def shipped_prior(profile: DeviceProfile) -> Prior | None:
    """The prior for a device: that of GPUs where there are parts to share, else none."""
    if profile.tpcs == 1:
        return None
    data = (resources.files("learner") / "priors" / "gpu.json").read_bytes()
    return msgspec.json.decode(data, type=Prior)


def cold_snapshot(profile: DeviceProfile) -> Snapshot:
    """Version 0 of a model of this device: its shipped prior, or the roofline."""
    prior = shipped_prior(profile)
    return Snapshot.roofline() if prior is None else prior.snapshot()
