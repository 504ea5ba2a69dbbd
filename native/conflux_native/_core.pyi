"""The C++ extension.

Streams are CUDA stream handles as integers (``torch.cuda.Stream.cuda_stream``), made by `Device.create_stream`, by
`GreenPartition.create_stream` or by PyTorch; the default streams (0, 1 and 2) are refused with ValueError. A TPC is a
pair of SMs: TPC i is the SMs 2i and 2i + 1, numbered as a kernel's %smid does. Every call of the driver releases the
GIL, and raises `CudaError` if the driver reports an error, `DriverMissing` if the driver is too old to have it.
"""

from collections.abc import Callable, Iterable

from .errors import CudaError as CudaError
from .errors import DeviceStuck as DeviceStuck
from .errors import DriverMissing as DriverMissing

class Driver:
    """The NVIDIA driver's library, loaded and initialised; never unloaded.

    Raises `DriverMissing` where it cannot be loaded or lacks a function that all drivers since CUDA 12.0 have, and
    `CudaError` where cuInit fails (CUDA_ERROR_NO_DEVICE: there is a driver, but no GPU for this process).
    """

    def __init__(self, path: str = "libcuda.so.1") -> None: ...
    @property
    def path(self) -> str:
        """The file that was loaded, links resolved: its name ends in the driver's version."""
    @property
    def version(self) -> int:
        """The CUDA version that the driver is for: 13000 is CUDA 13.0."""
    @property
    def device_count(self) -> int:
        """GPUs that this process may use (CUDA_VISIBLE_DEVICES)."""
    def has(self, symbol: str) -> bool:
        """Whether the library exports a symbol, such as "cuDevSmResourceSplit"."""

class Device:
    """One GPU, through its primary context: the one that PyTorch uses too.

    The context is current during each call only; the caller's own is restored. ``ordinal`` counts the GPUs that this
    process may use; ValueError if there is none of that number. Safe to use from several threads; probes take turns.

    After a TimeoutError the device is stuck, since nothing can stop a hung kernel: memory that it may still write to is
    never freed, `destroy_stream` does nothing, `synchronize` still polls, and all else raises `DeviceStuck`. End the
    process.
    """

    def __init__(self, driver: Driver, ordinal: int = 0) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str:
        """As nvidia-smi shows it ("GPU-…"); empty where the driver does not tell."""
    @property
    def compute_capability(self) -> tuple[int, int]: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def total_memory_bytes(self) -> int: ...
    @property
    def stuck(self) -> bool:
        """Whether a call has timed out."""
    def stream_priorities(self) -> tuple[int, int]:
        """(least, greatest) as the driver says; a smaller number is a greater priority, such as (0, -5)."""
    def create_stream(self, priority: int = 0) -> int:
        """The handle of a new stream that does not wait for the default stream, for ``torch.cuda.ExternalStream``."""
    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream that `create_stream` made, once its work is done."""
    def synchronize(self, stream: int, timeout_s: float) -> bool:
        """Waits until a stream's work is done; False if it is not after ``timeout_s``, which leaves the device usable.

        Raises `CudaError` if work on the context failed, at whatever time.
        """
    def smid_histogram(self, stream: int, timeout_s: float = 5.0, blocks_per_sm: int = 4) -> list[int]:
        """How many blocks of a probe launched on ``stream`` ran on each SM, by SM id.

        The grid has ``blocks_per_sm`` × `sm_count` blocks, of which at most two fit on an SM at once, each for 20 µs:
        with three or more, every SM that the stream may use sees one, unless other work fills it. One entry per SM,
        more if ids go beyond `sm_count`. TimeoutError after ``timeout_s``.
        """
    def cluster_samples(self, stream: int, cluster_size: int, clusters: int, timeout_s: float = 5.0) -> list[list[int]]:
        """The SM ids of each of ``clusters`` thread-block clusters, by rank in the cluster.

        ValueError where compute capability is below 9.0 or ``cluster_size`` outside 1..16; TimeoutError after
        ``timeout_s``, also when the stream's SMs have no room for such a cluster.
        """
    def max_active_clusters(self, cluster_size: int) -> int:
        """How many clusters of ``cluster_size`` blocks of 1,024 threads the whole GPU holds at once; 0: none fits."""
    def launch_spin(self, stream: int, iterations: int, blocks: int, threads: int = 256) -> None:
        """Launches multiply-adds on registers: 16 per thread and iteration, in four independent chains; no memory."""
    def launch_read(self, stream: int, bytes: int, repeats: int, blocks: int, threads: int = 256) -> None:  # noqa: A002
        """Launches ``repeats`` reads of a buffer of ``bytes`` (a multiple of 16) from end to end, 16 bytes per load.

        For memory bandwidth ``bytes`` must be far beyond the GPU's L2 cache. The buffer belongs to the device and lives
        as long.
        """
    def hold(self, stream: int, milliseconds: float, blocks: int) -> None:
        """Launches blocks of 32 threads that only wait, by the GPU's wall clock."""
    def elapsed_ms(self, stream: int, launch: Callable[[], object], timeout_s: float) -> float:
        """Milliseconds on the GPU, between two CUDA events, of what ``launch()`` puts on ``stream``.

        What ``launch`` raises passes through. TimeoutError after ``timeout_s``, counted from the end of ``launch``.
        """

class Mask:
    """An immutable set of enabled TPCs, 0..127. ValueError for others or for none at all, TypeError for no integers."""

    def __init__(self, tpcs: Iterable[int]) -> None: ...
    @property
    def tpcs(self) -> list[int]:
        """The enabled TPCs, ascending."""
    @property
    def words(self) -> tuple[int, int, int, int]:
        """128 bits as the driver reads them, TPC 0 in the lowest of the first word: a set bit *disables* a TPC."""
    def __len__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class MaskSlot:
    """The place where a driver keeps a stream's mask: ``{u32 enabled; u32 mask[4]}`` at ``*(char**)stream + offset``.

    Found by Bakita and Anderson (RTAS 2023, ECRTS 2025); no documented interface. A wrong offset corrupts memory of the
    driver: use one that was verified on this driver (`conflux_native.search`). ValueError unless ``offset`` is a
    multiple of 4 in 4..4092. A handle that is no stream's crashes the process.

    The mask counts for kernels launched from now on; a CUDA graph keeps that of its capture. No other thread may launch
    on the stream at the same time.
    """

    def __init__(self, offset: int) -> None: ...
    @property
    def offset(self) -> int: ...
    def apply(self, stream: int, mask: Mask, /) -> None:
        """Kernels launched on ``stream`` from now on run on the mask's TPCs."""
    def read(self, stream: int, /) -> Mask | None:
        """The stream's mask; None if it has none."""
    def clear(self, stream: int, /) -> None:
        """Takes the stream's mask away."""
    def raw(self, stream: int) -> bytes:
        """The 20 bytes that are there. Safe at any offset; only writing is not."""
    def restore(self, stream: int, raw: bytes) -> None:
        """Writes back what `raw` returned."""
    def cost_ns(self, stream: int, a: Mask, b: Mask, repeats: int) -> float:
        """Mean nanoseconds of one `apply`, ``a`` and ``b`` in turn, without Python; restores what was there."""

class GreenPartition:
    """A GPU in two parts by green contexts: one of at least ``sms`` SMs, and the rest.

    Sizes are rounded up to the driver's granularity (`green_granularity`), so that each part can host clusters; with
    ``ignore_coscheduling`` to 2 SMs, without that guarantee. ``structured`` uses cuDevSmResourceSplit (CUDA 13.1); None
    means: if the driver has it. ValueError for a size that leaves nothing for one part; `DriverMissing` where the
    driver has no green contexts, or no structured split when asked for one.
    """

    def __init__(
        self, device: Device, sms: int, ignore_coscheduling: bool = False, structured: bool | None = None
    ) -> None: ...
    @property
    def sm_counts(self) -> tuple[int, int]:
        """SMs of the two parts."""
    @property
    def structured(self) -> bool:
        """Whether cuDevSmResourceSplit made the parts."""
    def create_stream(self, part: int, priority: int = 0) -> int:
        """The handle of a new stream on part 0 or 1. `destroy` destroys it; don't do so yourself."""
    def destroy(self) -> None:
        """Destroys the streams and the contexts; a second call does nothing."""

def green_granularity(device: Device) -> tuple[int, int] | None:
    """(fewest SMs of a part, step between sizes) of green contexts; None where the driver has none."""
