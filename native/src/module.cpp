// The Python module conflux_native._core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>

#include "device.h"
#include "green.h"
#include "mask.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace conflux;

namespace {

// The GIL is released wherever the driver is called, since any call may wait for the GPU. MaskSlot alone keeps it: it
// writes 20 bytes.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// An attribute of conflux_native.errors, where the exceptions are defined: they exist without the extension too.
nb::object error_type(const char* name) { return nb::module_::import_("conflux_native.errors").attr(name); }

void translate(const std::exception_ptr& pointer, void*) {
    const auto raise = [](const char* type, const char* text) {
        PyErr_SetString(error_type(type).ptr(), text);
    };
    try {
        std::rethrow_exception(pointer);
    } catch (const CudaError& error) {
        nb::object type = error_type("CudaError");
        PyErr_SetObject(type.ptr(), type(error.what(), error.name, error.code, error.function).ptr());
    } catch (const DriverMissing& error) {
        raise("DriverMissing", error.what());
    } catch (const DeviceStuck& error) {
        raise("DeviceStuck", error.what());
    } catch (const Timeout& error) {
        PyErr_SetString(PyExc_TimeoutError, error.what());
    }
}

double elapsed_ms(Device& device, std::uintptr_t stream, const nb::callable& launch, double timeout_s) {
    Device::Timing timing;
    {
        nb::gil_scoped_release unlocked;
        timing = device.begin_timing(stream);
    }
    struct Drop {
        Device& device;
        Device::Timing& timing;
        ~Drop() { device.drop_timing(timing); }
    } drop{device, timing};
    launch();
    nb::gil_scoped_release unlocked;
    return device.end_timing(stream, timing, timeout_s);
}

double cost_ns(const MaskSlot& slot, std::uintptr_t stream, const Mask& a, const Mask& b, std::uint32_t repeats) {
    if (repeats == 0) throw std::invalid_argument("repeats must be at least 1");
    const auto before = slot.raw(stream);
    const auto start = std::chrono::steady_clock::now();
    for (std::uint32_t i = 0; i < repeats; ++i) slot.apply(stream, i % 2 ? b : a);
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
    slot.restore(stream, before);
    return taken.count() / repeats;
}

nb::bytes raw_of(const MaskSlot& slot, std::uintptr_t stream) {
    const auto raw = slot.raw(stream);
    return nb::bytes(raw.data(), raw.size());
}

void restore(const MaskSlot& slot, std::uintptr_t stream, const nb::bytes& bytes) {
    MaskSlot::Raw raw;
    if (bytes.size() != raw.size()) throw std::invalid_argument("raw must be the 20 bytes that raw() returned");
    std::memcpy(raw.data(), bytes.data(), raw.size());
    slot.restore(stream, raw);
}

// Integers alone: nanobind's own conversion of numbers differs between its versions.
std::vector<std::int64_t> tpcs_of(const nb::iterable& tpcs) {
    std::vector<std::int64_t> ids;
    for (nb::handle tpc : tpcs) {
        const Py_ssize_t id = PyNumber_AsSsize_t(tpc.ptr(), nullptr);  // what does not fit is the largest that does
        if (id == -1 && PyErr_Occurred()) throw nb::python_error();
        ids.push_back(id);
    }
    return ids;
}

nb::tuple words_of(const Mask& mask) {
    const auto& words = mask.words();
    return nb::make_tuple(words[0], words[1], words[2], words[3]);
}

std::string shown_mask(const Mask& mask) {
    std::string text = "Mask([";
    for (int tpc : mask.tpcs()) text += std::to_string(tpc) + ", ";
    return text.substr(0, text.size() - 2) + "])";
}

std::string shown_driver(const Driver& driver) {
    return "<Driver " + driver.path() + ", CUDA " + std::to_string(driver.version() / 1000) + "." +
           std::to_string(driver.version() % 1000 / 10) + ">";
}

std::string shown_device(const Device& device) {
    return "<Device " + std::to_string(device.ordinal()) + ": " + device.name() + ">";
}

}  // namespace

NB_MODULE(_core, m) {
    // A server keeps its Device until it ends; that is no leak worth a report on its standard error.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(translate);
    for (const char* name : {"CudaError", "DriverMissing", "DeviceStuck"}) m.attr(name) = error_type(name);

    nb::class_<Driver>(m, "Driver", "The NVIDIA driver's library, loaded at run time.")
        .def(nb::init<const std::string&>(), "path"_a = "libcuda.so.1", Unlocked())
        .def_prop_ro("path", &Driver::path, "The file that was loaded.")
        .def_prop_ro("version", &Driver::version, "The CUDA version it is for: 13000 is 13.0.")
        .def_prop_ro("device_count", &Driver::device_count, "GPUs that this process may use.")
        .def("has", &Driver::has, "symbol"_a, "Whether the library exports a symbol.")
        .def("__repr__", shown_driver);

    nb::class_<Device>(m, "Device", "One GPU: streams, waits with a deadline, and probes that say where blocks run.")
        .def(nb::init<std::shared_ptr<Driver>, int>(), "driver"_a, "ordinal"_a = 0, Unlocked())
        .def_prop_ro("ordinal", &Device::ordinal)
        .def_prop_ro("name", &Device::name)
        .def_prop_ro("uuid", &Device::uuid, "GPU-…, as nvidia-smi shows it; empty where the driver does not tell.")
        .def_prop_ro("compute_capability", &Device::compute_capability)
        .def_prop_ro("sm_count", &Device::sm_count)
        .def_prop_ro("total_memory_bytes", &Device::total_memory_bytes)
        .def_prop_ro("stuck", &Device::stuck, "Whether something has timed out: nothing else is possible then.")
        .def("stream_priorities", &Device::stream_priorities, Unlocked(), "(least, greatest); greater is smaller.")
        .def("create_stream", &Device::create_stream, "priority"_a = 0, Unlocked(), "A new stream's handle.")
        .def("destroy_stream", &Device::destroy_stream, "stream"_a, Unlocked())
        .def("synchronize", &Device::synchronize, "stream"_a, "timeout_s"_a, Unlocked(),
             "Waits for a stream's work; False if that took longer.")
        .def("smid_histogram", &Device::smid_histogram, "stream"_a, "timeout_s"_a = 5.0, "blocks_per_sm"_a = 4,
             Unlocked(), "How many blocks of a probe ran on each SM.")
        .def("cluster_samples", &Device::cluster_samples, "stream"_a, "cluster_size"_a, "clusters"_a,
             "timeout_s"_a = 5.0, Unlocked(), "The SMs of each of some thread-block clusters.")
        .def("max_active_clusters", &Device::max_active_clusters, "cluster_size"_a, Unlocked(),
             "How many clusters of that size fit on the GPU at once.")
        .def("launch_spin", &Device::launch_spin, "stream"_a, "iterations"_a, "blocks"_a, "threads"_a = 256, Unlocked(),
             "Multiply-adds on registers: 16 per thread and iteration.")
        .def("launch_read", &Device::launch_read, "stream"_a, "bytes"_a, "repeats"_a, "blocks"_a, "threads"_a = 256,
             Unlocked(), "Reads a buffer from end to end.")
        .def("hold", &Device::hold, "stream"_a, "milliseconds"_a, "blocks"_a, Unlocked(), "Blocks that only wait.")
        .def("elapsed_ms", elapsed_ms, "stream"_a, "launch"_a, "timeout_s"_a,
             "Milliseconds on the GPU of what launch() puts on the stream.")
        .def("__repr__", shown_device);

    nb::class_<Mask>(m, "Mask", "A set of enabled TPCs.")
        .def("__init__", [](Mask* self, const nb::iterable& tpcs) { new (self) Mask(tpcs_of(tpcs)); }, "tpcs"_a)
        .def_prop_ro("tpcs", &Mask::tpcs, "The enabled TPCs, ascending.")
        .def_prop_ro("words", words_of, "As the driver reads them: a set bit disables a TPC.")
        .def("__len__", &Mask::size)
        .def("__eq__", [](const Mask& a, const Mask& b) { return a == b; }, nb::is_operator())
        .def("__hash__", [](const Mask& mask) { return nb::hash(words_of(mask)); })
        .def("__reduce__", [](const Mask& mask) {
            return nb::make_tuple(nb::type<Mask>(), nb::make_tuple(nb::cast(mask.tpcs())));
        })
        .def("__repr__", shown_mask);

    nb::class_<MaskSlot>(m, "MaskSlot", "The place of a mask in a stream's structure. A wrong one corrupts memory.")
        .def(nb::init<std::int64_t>(), "offset"_a)
        .def_prop_ro("offset", &MaskSlot::offset)
        // Without names for the arguments, which makes a call a third cheaper.
        .def("apply", &MaskSlot::apply, nb::sig("def apply(self, stream: int, mask: Mask, /) -> None"),
             "Kernels launched on the stream from now on run on the mask's TPCs.")
        .def("read", &MaskSlot::read, nb::sig("def read(self, stream: int, /) -> Mask | None"),
             "The stream's mask, None if it has none.")
        .def("clear", &MaskSlot::clear, nb::sig("def clear(self, stream: int, /) -> None"),
             "Takes the stream's mask away.")
        .def("raw", raw_of, "stream"_a, "The 20 bytes that are there.")
        .def("restore", restore, "stream"_a, "raw"_a, "Writes what raw() returned.")
        .def("cost_ns", cost_ns, "stream"_a, "a"_a, "b"_a, "repeats"_a, "Nanoseconds of one change of mask.")
        .def("__repr__", [](const MaskSlot& slot) { return "MaskSlot(" + std::to_string(slot.offset()) + ")"; });

    nb::class_<GreenPartition>(m, "GreenPartition", "A GPU in two parts by green contexts.")
        .def(nb::init<std::shared_ptr<Device>, unsigned, bool, std::optional<bool>>(), "device"_a, "sms"_a,
             "ignore_coscheduling"_a = false, "structured"_a = nb::none(), Unlocked())
        .def_prop_ro("sm_counts", &GreenPartition::sm_counts, "SMs of the two parts.")
        .def_prop_ro("structured", &GreenPartition::structured, "Whether cuDevSmResourceSplit made it.")
        .def("create_stream", &GreenPartition::create_stream, "part"_a, "priority"_a = 0, Unlocked(),
             "A new stream on one part; the partition destroys it.")
        .def("destroy", &GreenPartition::destroy, Unlocked(), "Streams and contexts; once is enough, twice is fine.");

    m.def("green_granularity", &green_granularity, "device"_a, Unlocked(),
          "(fewest SMs of a part, step) of green contexts; None where the driver has none.");
}
