from __future__ import annotations

from tests.native.conftest import (  # noqa: F401
    newest,
    old,
    stand_in,
    stand_in_580,
    stand_in_newest,
    stand_in_old,
)
