"""A search in a world of its own: a stand-in driver whose settings hold in this process and in its children."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conflux_native import child_process, trials
from conflux_native.trials import Attempt

from .standin import StandIn

if TYPE_CHECKING:
    from conflux_native.search import Found


class World:
    """A stand-in driver with settings that hold here and in children, and the pids of the children so far."""

    def __init__(self, library: StandIn, patch: pytest.MonkeyPatch, memory: Path) -> None:
        self.library, self.patch, self.memory = library, patch, memory
        self.pids: list[int] = []

    def find(self, offsets: list[int] | None = None, skip_known: bool = False, **options: float | bool) -> Found:
        from conflux_native.search import find_slot

        return find_slot(
            driver_path=self.library.path,
            offsets=offsets,
            skip_known=skip_known,
            remembered_dir=self.memory,
            timeout_s=float(options.get("timeout_s", 300.0)),
            probe_timeout_s=float(options.get("probe_timeout_s", 2.0)),
            use_memory=bool(options.get("use_memory", True)),
        )

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            self.patch.setenv(f"STAND_IN_{name}", str(value))


@pytest.fixture(name="world")
def make_world(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    world = World(stand_in, monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "no-mps"))

    class Noted(child_process.ChildProcess):
        def __init__(self, arguments: Sequence[str]) -> None:
            super().__init__(arguments)
            world.pids.append(self.pid)

    monkeypatch.setattr(trials, "ChildProcess", Noted)
    yield world
    assert not [pid for pid in world.pids if os.path.exists(f"/proc/{pid}")], "no child, dead or alive, may be left"
    assert stand_in.live("contexts") == 0
    assert stand_in.live("streams") == 0


def outcomes(tried: tuple[Attempt, ...]) -> dict[int, str]:
    assert len({attempt.offset for attempt in tried}) == len(tried), "each offset is reported once"
    return {attempt.offset: attempt.outcome for attempt in tried}
