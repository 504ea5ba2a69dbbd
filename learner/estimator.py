"""The online model: learns from timed iterations, publishes snapshots, survives a restart."""

from __future__ import annotations
