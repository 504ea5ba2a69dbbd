"""Serving a trace on simulated time: the real policy decides, a latency model is the device."""
