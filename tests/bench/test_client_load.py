"""The measurement of the client's own lateness, in small."""

from __future__ import annotations

from bench.client_load import measure


def test_every_token_of_every_stream_is_measured(monkeypatch) -> None:
    monkeypatch.setattr("bench.client_load.RAMP_S", 0.2)
    figures = measure(streams=20, rate=20.0, seconds=1.0)
    assert figures["failed"] == 0
    # All tokens but those from before the last stream came.
    assert 20 * 20 * 0.6 < figures["tokens_measured"] <= 20 * 20
    # A token cannot be read before it was written.
    assert 0.0 < figures["p50_lateness_ms"] <= figures["p99_lateness_ms"] <= figures["max_lateness_ms"]
