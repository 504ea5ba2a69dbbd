"""Passed self-tests, remembered from start to start."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.sm.watched import Report

_KIND = "sm-self-test"

Key = dict[str, str | int]


class Memory:
    """Files in ``folder``; None: nothing is remembered. What cannot be read or written is forgotten, never an error."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def recall(self, key: Key) -> Report | None:
        if self.folder is None:
            return None
        from conflux_native.remembered import recall

        value = recall(self.folder, _KIND, key)
        try:
            return None if value is None else Report.from_dict(value)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def keep(self, key: Key, report: Report) -> None:
        if self.folder is not None:
            from conflux_native.remembered import remember

            remember(self.folder, _KIND, key, report.to_dict())

    def forget(self, key: Key) -> None:
        if self.folder is not None:
            from conflux_native.remembered import forget

            forget(self.folder, _KIND, key)
