"""The checks of a level: room for clusters, and GEMMs whose results are known exactly."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sglang_ext.sm import checks  # noqa: E402
from sglang_ext.sm.control import Handles  # noqa: E402
from tests.sm.on_cpu import OnCpu  # noqa: E402

HANDLES = Handles(decode=1, prefill=2, decode_tpcs=8, prefill_tpcs=58)
SHAPES = ((64, 32), (32, 48))


class Device:
    """Streams end, but for those in ``hung``; clusters of some sizes have room nowhere, or on no stream with a mask."""

    compute_capability = (9, 0)
    sm_count = 132

    def __init__(self, hung: tuple[int, ...] = (), largest: int = 16, waiting: dict[int, int] | None = None) -> None:
        self.hung, self.largest, self.waiting = hung, largest, waiting or {}
        self.launched: list[tuple[int, int]] = []

    def synchronize(self, stream: int, timeout_s: float) -> bool:
        return stream not in self.hung

    def handles(self, tpcs: int) -> Handles:
        return HANDLES

    def max_active_clusters(self, size: int) -> int:
        return self.largest // size

    def cluster_samples(self, stream: int, size: int, clusters: int, timeout_s: float) -> list[list[int]]:
        self.launched.append((stream, size))
        if self.waiting.get(stream, 99) <= size:
            raise TimeoutError("nothing after 5 s")
        return []


def clusters(device: Any) -> tuple[int, ...]:
    return checks.check_clusters(device, device, 8, 5.0)


@pytest.mark.parametrize(("largest", "sizes"), [(16, range(2, 9)), (8, range(2, 9)), (6, range(2, 7)), (1, ())])
def test_clusters_of_every_size_that_the_gpu_hosts_run_on_both_streams(largest: int, sizes: Any) -> None:
    device = Device(largest=largest)
    assert clusters(device) == tuple(sizes)
    assert device.launched == [(stream, size) for stream in (1, 2) for size in sizes]


def test_a_chip_without_clusters_is_asked_for_none() -> None:
    device = Device()
    device.compute_capability = (8, 6)
    assert clusters(device) == ()
    assert device.launched == []


@pytest.mark.parametrize(("stream", "side"), [(1, "decode"), (2, "prefill")])
def test_clusters_that_find_no_room_are_named(stream: int, side: str) -> None:
    with pytest.raises(TimeoutError, match=f"clusters of 5 blocks on the {side} stream did not end: nothing after"):
        clusters(Device(waiting={stream: 5}))


def test_gemms_pass_on_both_streams_with_every_row_count() -> None:
    class Noting(OnCpu):
        def launched(self, stream: int, shape: tuple[int, int]) -> None:
            ran.append((stream, shape))

    ran: list[Any] = []
    Noting(0, SHAPES).check(Device(), HANDLES, 1.0)
    assert ran == [(stream, shape) for shape in SHAPES for _ in checks.ROWS for stream in (1, 2)]


def test_operands_are_exact_and_sums_small_for_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ROWS", (1, 64))
    # Llama 3.1 405B's, the longest of a well-known model's.
    gemms = OnCpu(0, ((53248, 24), (64, 24)))
    for products in gemms._expected:
        for product in products:
            assert torch.equal(product.float(), product.float().round())
            assert 0 < float(product.abs().max()) < 256


def test_the_default_shapes_hold_those_that_hung_and_a_large_models() -> None:
    assert set(checks.SHAPES) >= {(1024, 2048), (1024, 1024), (1024, 4096), (2048, 1024), (4096, 4096), (4096, 12288)}
    assert {1, 8, 16, 32, 48, 64, 128, 256, 2048} <= set(checks.ROWS)


def test_a_hung_stream_is_named_with_the_shape() -> None:
    with pytest.raises(TimeoutError, match="a bf16 GEMM of K = 64, N = 32 on the prefill stream did not end within 1"):
        OnCpu(0, SHAPES).check(Device(hung=(2,)), HANDLES, 1.0)


def test_a_wrong_number_is_found() -> None:
    class Wrong(OnCpu):
        def _linear(self, x: Any, weight: Any) -> Any:
            found = super()._linear(x, weight)
            if self.stream == 1 and found.shape == (48, 48):
                found[47, 47] += 1
            return found

    gemms = Wrong(0, SHAPES)
    with pytest.raises(checks.WrongError, match="GEMM of M = 48, K = 32, N = 48 on the decode stream gave wrong"):
        gemms.check(Device(), HANDLES, 1.0)


def test_a_gpu_that_is_wrong_without_masks_is_not_blamed_on_them() -> None:
    class Wrong(OnCpu):
        def _linear(self, x: Any, weight: Any) -> Any:
            return super()._linear(x, weight) + 1

    with pytest.raises(RuntimeError, match="computes a wrong product of a bf16 GEMM of M = 1, K = 64, N = 32"):
        Wrong(0, SHAPES)


def test_gemms_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="finds no CUDA device"):
        checks.Gemms(0)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1))
def test_shapes_as_text_are_read_back_each_once_in_order(shapes: list[tuple[int, int]]) -> None:
    text = checks.shapes_text(shapes)
    assert checks.parse_shapes(text) == tuple(sorted(set(shapes)))
    assert checks.shapes_text(list(reversed(shapes))) == text


@pytest.mark.parametrize("text", ["", "x", "12", "1x2x3", "0x4", "-1x4", "1x2,", "axb"])
def test_other_text_is_no_shapes(text: str) -> None:
    with pytest.raises(ValueError, match=r"shapes are|invalid literal"):
        checks.parse_shapes(text)
