"""Driver and device against a stand-in: what they say, and every way in which they fail."""

from __future__ import annotations

import ast
import gc
import pickle
from pathlib import Path

import pytest

import conflux_native
from conflux_native import CudaError, Device, Driver, DriverMissing, Mask, MaskSlot

from .standin import StandIn, build


def test_without_a_driver_the_message_says_what_to_do() -> None:
    with pytest.raises(DriverMissing, match=r"/nowhere/libcuda.so.1 cannot be loaded .*install the driver"):
        Driver("/nowhere/libcuda.so.1")


def test_a_library_that_is_no_driver_is_refused() -> None:
    with pytest.raises(DriverMissing, match=r"lacks cuInit"):
        Driver("libc.so.6")


def test_a_missing_symbol_is_named(tmp_path: Path) -> None:
    path = build(tmp_path, without=("cuStreamCreateWithPriority",))
    with pytest.raises(DriverMissing, match=r"lacks cuStreamCreateWithPriority.*install a current driver"):
        Driver(str(path))


def test_what_the_driver_says_of_itself(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.set(VERSION=13000, DEVICES=3)
    link = tmp_path / "libcuda.so"
    link.symlink_to(stand_in.path)
    driver = Driver(str(link))
    assert driver.path == stand_in.path
    assert (driver.version, driver.device_count) == (13000, 3)
    assert driver.has("cuGreenCtxCreate")
    assert not driver.has("cuDevSmResourceSplit")
    assert "CUDA 13.0" in repr(driver)


def test_a_version_that_nobody_knows_is_just_a_number(stand_in: StandIn) -> None:
    stand_in.set(VERSION=99990)
    assert Driver(stand_in.path).version == 99990


def test_errors_have_their_name_code_and_function(stand_in: StandIn) -> None:
    stand_in.set(FAIL="cuInit=100")
    with pytest.raises(
        CudaError, match=r"cuInit failed: CUDA_ERROR_NO_DEVICE \(100\); .*CUDA_VISIBLE_DEVICES"
    ) as caught:
        Driver(stand_in.path)
    assert (caught.value.name, caught.value.code, caught.value.function) == ("CUDA_ERROR_NO_DEVICE", 100, "cuInit")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.name, again.code) == (str(caught.value), "CUDA_ERROR_NO_DEVICE", 100)


@pytest.mark.parametrize(
    ("symbol", "function"),
    [
        ("cuDriverGetVersion", "cuDriverGetVersion"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain"),
        ("cuDeviceTotalMem_v2", "cuDeviceTotalMem"),
        ("cuCtxPushCurrent_v2", "cuCtxPushCurrent"),
        ("cuStreamCreateWithPriority", "cuStreamCreateWithPriority"),
        ("cuModuleLoadData", "cuModuleLoadData"),
        ("cuModuleGetFunction", "cuModuleGetFunction"),
        ("cuMemAlloc_v2", "cuMemAlloc"),
        ("cuMemAllocHost_v2", "cuMemAllocHost"),
        ("cuMemsetD32Async", "cuMemsetD32Async"),
        ("cuLaunchKernel", "cuLaunchKernel"),
        ("cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync"),
        ("cuStreamQuery", "cuStreamQuery"),
    ],
)
def test_every_failure_on_the_way_to_a_histogram_is_raised(stand_in: StandIn, symbol: str, function: str) -> None:
    stand_in.set(FAIL=f"{symbol}=4321")
    with pytest.raises(CudaError, match=f"{function} failed: CUDA_ERROR_4321") as caught:
        histogram(stand_in)
    assert (caught.value.name, caught.value.code, caught.value.function) == ("CUDA_ERROR_4321", 4321, function)
    assert stand_in.context_depth() == 0
    del caught  # its traceback holds the device
    gc.collect()
    stand_in.set(FAIL=None)
    assert histogram(stand_in) == [4] * 132
    assert [stand_in.live(kind) for kind in ("memory", "host")] == [0, 0]


def histogram(stand_in: StandIn) -> list[int]:
    device = Device(Driver(stand_in.path))
    return device.smid_histogram(device.create_stream())


def test_an_error_on_the_gpu_comes_out_of_whatever_is_called_next(stand_in: StandIn, device: Device) -> None:
    stream = device.create_stream()
    stand_in.set(ERROR="0x600")
    MaskSlot(0x600).apply(stream, Mask([0]))
    with pytest.raises(CudaError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*process must end"):
        device.smid_histogram(stream)
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.synchronize(stream, 1.0)


def test_what_a_device_is(stand_in: StandIn) -> None:
    stand_in.set(DEVICES=2, NAME="NVIDIA H200", CAPABILITY=103, TPCS=70, MEMORY_GIB=2)
    device = Device(Driver(stand_in.path), 1)
    assert (device.ordinal, device.name, device.sm_count, device.compute_capability) == (1, "NVIDIA H200", 140, (10, 3))
    assert device.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e01"
    assert device.total_memory_bytes == 2 << 30
    assert device.stream_priorities() == (0, -5)
    assert "NVIDIA H200" in repr(device)


def test_a_gpu_that_is_not_there(stand_in: StandIn) -> None:
    for ordinal in (1, -1):
        with pytest.raises(ValueError, match=f"no GPU {ordinal}: the driver sees 1"):
            Device(Driver(stand_in.path), ordinal)


def test_an_old_driver_does_what_it_can(old: StandIn) -> None:
    device = Device(Driver(old.path))
    assert device.uuid == ""
    assert device.smid_histogram(device.create_stream()) == [4] * 132
    with pytest.raises(DriverMissing, match=r"lacks cuLaunchKernelEx.*newer driver"):
        device.cluster_samples(device.create_stream(), 2, 2)
    with pytest.raises(DriverMissing, match="cuOccupancyMaxActiveClusters"):
        device.max_active_clusters(2)


def test_streams_have_their_priority_and_are_given_back(stand_in: StandIn, device: Device) -> None:
    stream = device.create_stream(priority=-3)
    assert stand_in.priority(stream) == -3
    assert stand_in.live("streams") == 1
    device.destroy_stream(stream)
    assert stand_in.live("streams") == 0
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        device.destroy_stream(stream)


def use_everything(stand_in: StandIn) -> None:
    device = Device(Driver(stand_in.path))
    stream = device.create_stream()
    device.smid_histogram(stream)
    device.cluster_samples(stream, 4, 2000)
    device.launch_read(stream, 1 << 20, 1, 8)
    device.launch_read(stream, 1 << 21, 1, 8)
    device.elapsed_ms(stream, lambda: device.launch_spin(stream, 10, 8), 600.0)
    assert stand_in.live("memory") == 4
    device.destroy_stream(stream)


def test_a_device_gives_all_back(stand_in: StandIn) -> None:
    use_everything(stand_in)
    kinds = ("streams", "memory", "host", "events", "contexts")
    assert [stand_in.live(kind) for kind in kinds] == [0] * 5


def test_the_stub_names_what_there_is() -> None:
    stub = ast.parse((Path(conflux_native.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            assert callable(getattr(conflux_native._core, node.name))
        if not isinstance(node, ast.ClassDef):
            continue
        real = getattr(conflux_native._core, node.name)
        documented = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        public = {name for name in vars(real) if not name.startswith("_")}
        assert {name for name in documented if not name.startswith("_")} == public
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                signature = getattr(vars(real)[item.name], "__nb_signature__", None)
                names = [argument.arg for argument in (*item.args.posonlyargs, *item.args.args)]
                assert signature is None or all(name in signature[0][0] for name in names), item.name
