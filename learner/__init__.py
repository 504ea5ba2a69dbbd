"""The latency model and its learner: batch vocabulary, roofline, snapshots, and the process that learns them."""

from learner.device import DeviceProfile
from learner.latency import LatencyModel, Prediction, Terms
from learner.records import Candidates, Header, Iteration, StreamRecord
from learner.shape import ModelShape
from learner.snapshot import Snapshot

__all__ = [
    "Candidates",
    "DeviceProfile",
    "Header",
    "Iteration",
    "LatencyModel",
    "ModelShape",
    "Prediction",
    "Snapshot",
    "StreamRecord",
    "Terms",
]
