"""What must hold before a level is used: where kernels really run, room for clusters, right results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext.sm.control import Handles, SmControl

if TYPE_CHECKING:
    import torch

LARGEST_CLUSTER = 8
"""Blocks of the largest cluster that a kernel may launch without asking for more."""

_BLOCKS_PER_SM = (4, 16, 64)
"""A probe of few blocks may pass an SM over; it is repeated with more before that counts."""

Shapes = Sequence[tuple[int, int]]
"""(K, N) of the weights of linear layers: inputs and outputs."""

SHAPES: Shapes = ((1024, 1024), (1024, 2048), (1024, 4096), (2048, 1024), (4096, 4096), (4096, 12288))
"""Where it is not known what will be served. Which clusters a GEMM launches depends on its shape: of those with
K = 1024 some hung on TPCs where those of a larger model ended."""

ROWS = (1, 8, 16, 32, 48, 64, 128, 256, 2048)
_LARGEST_SUM = 256  # up to here bfloat16 holds every integer
_OUTPUTS_AT_ONCE = 16384


class WrongError(Exception):
    """A stream's kernels ran where they must not, or computed nonsense. The message says which and how."""


def has_clusters(device: Any) -> bool:
    """Whether the chip has thread-block clusters at all."""
    return bool(device.compute_capability >= (9, 0))


def check_sms(device: Any, control: SmControl, tpcs: int, timeout_s: float) -> None:
    """Both streams of a level use exactly their SMs, and these are disjoint: a few probes of about a millisecond.

    Raises WrongError; TimeoutError if a probe does not end, after which the device is of no more use to the process.
    """
    handles = control.handles(tpcs)
    sides = {"decode": (handles.decode, handles.decode_tpcs, handles.decode_ids),
             "prefill": (handles.prefill, handles.prefill_tpcs, handles.prefill_ids)}  # fmt: skip
    used: dict[str, frozenset[int]] = {}
    for side, (stream, count, ids) in sides.items():
        seen = _sms_of(device, stream, 2 * count, timeout_s)
        used[side] = seen
        if ids is not None:
            planned = {sm for tpc in ids for sm in (2 * tpc, 2 * tpc + 1) if sm < device.sm_count}
            if seen != planned:
                raise WrongError(
                    f"{side} on {count} TPCs: kernels ran on SMs outside of the plan ({_some(seen - planned)}) or "
                    f"never on some of it ({_some(planned - seen)})"
                )
        elif len(seen) != 2 * count:
            raise WrongError(f"{side} was given {count} TPCs ({2 * count} SMs), but its kernels ran on {len(seen)} SMs")
    if both := used["decode"] & used["prefill"]:
        raise WrongError(f"decode on {tpcs} TPCs and prefill beside it share the SMs {_some(both)}")


def check_clusters(device: Any, control: SmControl, tpcs: int, timeout_s: float) -> tuple[int, ...]:
    """Clusters of every size up to :data:`LARGEST_CLUSTER` that the GPU hosts run on both streams; returns the sizes.

    Empty where the chip has no clusters. Raises TimeoutError for one that never ends, as :func:`check_sms` does.
    """
    if not has_clusters(device):
        return ()
    sizes = tuple(size for size in range(2, LARGEST_CLUSTER + 1) if device.max_active_clusters(size) > 0)
    handles = control.handles(tpcs)
    for side, stream in (("decode", handles.decode), ("prefill", handles.prefill)):
        for size in sizes:
            try:
                device.cluster_samples(stream, size, 4 * device.sm_count // size, timeout_s)
            except TimeoutError as error:
                raise TimeoutError(f"clusters of {size} blocks on the {side} stream did not end: {error}") from error
    return sizes


def shapes_text(shapes: Shapes) -> str:
    """They as text, each once, in order: ``1024x2048,4096x4096``."""
    return ",".join(f"{inputs}x{outputs}" for inputs, outputs in sorted(set(shapes)))


def parse_shapes(text: str) -> Shapes:
    """Read what :func:`shapes_text` wrote. Raises ValueError for anything else."""
    shapes = [tuple(map(int, one.split("x"))) for one in text.split(",")]
    pairs = tuple((one[0], one[1]) for one in shapes if len(one) == 2 and min(one) > 0)
    if len(pairs) != len(shapes):
        raise ValueError(f"shapes are positive numbers K and N as in 1024x2048,4096x4096, not {text!r}")
    return pairs


class Gemms:
    """bfloat16 GEMMs of [m, K] × [K, N] for :data:`ROWS` of m and given shapes, with exactly known results.

    The operands hold −1, 0 and 1, mostly 0, so every partial sum is a small integer that float32 and bfloat16 hold
    exactly: any algorithm on any number of SMs must give the very same numbers.
    """

    def __init__(self, ordinal: int, shapes: Shapes = SHAPES) -> None:
        """Needs torch with CUDA; the stream is an ordinary one. Raises RuntimeError otherwise."""
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no CUDA device")
        self._prepare(torch.device("cuda", ordinal), shapes)

    def _prepare(self, where: torch.device, shapes: Shapes) -> None:
        import torch

        self._torch, self._where, self._shapes = torch, where, shapes
        seeded = torch.Generator(where).manual_seed(0)

        def entries(count: int, one_in: int) -> torch.Tensor:
            drawn = torch.randint(0, 2 * one_in, (count,), generator=seeded, device=where, dtype=torch.int16)
            return (drawn == 0).to(torch.bfloat16) - (drawn == 1).to(torch.bfloat16)

        # Every weight is a view of the same numbers, so memory is that of the largest.
        numbers = entries(max(inputs * outputs for inputs, outputs in shapes), 4)
        self._weights = [numbers[: inputs * outputs].view(outputs, inputs) for inputs, outputs in shapes]
        # The longer the sums the fewer of their terms are not 0: all stay far below the largest.
        self._inputs = {
            inputs: [entries(rows * inputs, 4 * -(-inputs // 8192)).view(rows, inputs) for rows in ROWS]
            for inputs, _ in shapes
        }
        self._expected: list[list[torch.Tensor]] = []
        for shape, weight in zip(shapes, self._weights, strict=True):
            self._expected.append([self._product(x, weight) for x in self._inputs[shape[0]]])
            for x, expected in zip(self._inputs[shape[0]], self._expected[-1], strict=True):
                # The GEMMs run here too: each kernel is loaded before one may hang, since loading waits for what runs.
                if float(expected.abs().max()) >= _LARGEST_SUM or not torch.equal(self._linear(x, weight), expected):
                    raise RuntimeError(
                        f"torch {torch.__version__} computes a wrong product of {_named(shape, len(x))} on this GPU"
                    )

    def check(self, device: Any, handles: Handles, timeout_s: float) -> None:
        """Run all of them, shape by shape on both streams at once, and compare. Raises like :func:`check_sms`."""
        sides = {"decode": handles.decode, "prefill": handles.prefill}
        for shape, weight, products in zip(self._shapes, self._weights, self._expected, strict=True):
            results: dict[str, list[torch.Tensor]] = {side: [] for side in sides}
            # The largest first: the others wait behind it on both streams, and then run at once.
            for x in reversed(self._inputs[shape[0]]):
                for side, handle in sides.items():
                    with self._on(handle):
                        results[side].insert(0, self._linear(x, weight))
            for side, handle in sides.items():
                if not device.synchronize(handle, timeout_s):
                    raise TimeoutError(f"{_named(shape)} on the {side} stream did not end within {timeout_s:g} s")
            for side, found in results.items():
                for rows, one, expected in zip(ROWS, found, products, strict=True):
                    if not self._torch.equal(one, expected):
                        raise WrongError(f"{_named(shape, rows)} on the {side} stream gave wrong numbers")

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """In float32, some outputs at a time: a whole weight in float32 may be gigabytes."""
        starts = range(0, len(weight), _OUTPUTS_AT_ONCE)
        parts = [x.float() @ weight[start : start + _OUTPUTS_AT_ONCE].float().T for start in starts]
        return self._torch.cat(parts, 1).to(self._torch.bfloat16)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._torch.nn.functional.linear(x, weight)

    def _on(self, stream: int) -> Any:
        """A context in which launches go to that stream."""
        external: Any = self._torch.cuda.ExternalStream
        return self._torch.cuda.stream(external(stream, device=self._where))


def _sms_of(device: Any, stream: int, expected: int, timeout_s: float) -> frozenset[int]:
    """SMs that ran blocks of a stream, looked at until there are as many as ``expected``."""
    seen: frozenset[int] = frozenset()
    for blocks in _BLOCKS_PER_SM:
        histogram = device.smid_histogram(stream, timeout_s, blocks)
        seen |= {sm for sm, count in enumerate(histogram) if count}
        if len(seen) >= expected:
            break
    return seen


def _some(sms: Iterable[int], most: int = 8) -> str:
    listed = sorted(sms)
    return (", ".join(map(str, listed[:most])) + (" …" if len(listed) > most else "")) or "none"


def _named(shape: tuple[int, int], rows: int | None = None) -> str:
    many = "" if rows is None else f"M = {rows}, "
    return f"a bf16 GEMM of {many}K = {shape[0]}, N = {shape[1]}"
