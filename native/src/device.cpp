#include "device.h"

#include <cstdio>
#include <stdexcept>

namespace conflux {
namespace {

std::string formatted(const CUuuid& uuid) {
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
        char byte[4];
        std::snprintf(byte, sizeof byte, "%02x", uuid.bytes[i]);
        text += byte;
        if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
    }
    return text;
}

}  // namespace

CUstream stream_of(std::uintptr_t handle) {
    if (handle <= 2)
        throw std::invalid_argument("stream " + std::to_string(handle) +
                                    " is a default stream: create one of your own with Device.create_stream()");
    if (handle < 4096 || handle % 8 != 0)
        throw std::invalid_argument("stream " + std::to_string(handle) + " is not a CUDA stream's handle");
    return reinterpret_cast<CUstream>(handle);
}

Device::Device(std::shared_ptr<Driver> driver, int ordinal) : driver_(std::move(driver)), ordinal_(ordinal) {
    const Driver& cuda = *driver_;
    if (ordinal < 0 || ordinal >= cuda.device_count())
        throw std::invalid_argument("there is no GPU " + std::to_string(ordinal) + ": the driver sees " +
                                    std::to_string(cuda.device_count()) + ", numbered from 0");
    cuda.call(cuda.device_get, &handle_, ordinal);
    char name[256] = "";
    cuda.call(cuda.device_get_name, name, static_cast<int>(sizeof name), handle_);
    name[sizeof name - 1] = '\0';
    name_ = name;
    if (cuda.device_get_uuid.pointer) {
        CUuuid uuid{};
        cuda.call(cuda.device_get_uuid, &uuid, handle_);
        uuid_ = formatted(uuid);
    }
    cuda.call(cuda.device_get_attribute, &capability_.first, cuda::kComputeCapabilityMajor, handle_);
    cuda.call(cuda.device_get_attribute, &capability_.second, cuda::kComputeCapabilityMinor, handle_);
    cuda.call(cuda.device_get_attribute, &sm_count_, cuda::kMultiprocessorCount, handle_);
    cuda.call(cuda.device_total_memory, &total_memory_, handle_);
    cuda.call(cuda.primary_context_retain, &context_, handle_);
}

Device::~Device() {
    // Memory that a hung kernel may still write to must not go to somebody else, and freeing it would wait for ever.
    if (stuck_) return;
    const Driver& cuda = *driver_;
    if (enter()) {
        for (CUdeviceptr memory : retired_) cuda.memory_free.pointer(memory);
        for (CUdeviceptr memory : {probe_memory_, sink_, source_})
            if (memory) cuda.memory_free.pointer(memory);
        if (probe_copy_) cuda.host_free.pointer(probe_copy_);
        leave();
    }
    cuda.primary_context_release.pointer(handle_);
}

bool Device::enter() const noexcept { return driver_->context_push.pointer(context_) == cuda::kSuccess; }

void Device::leave() const noexcept {
    CUcontext popped;
    driver_->context_pop.pointer(&popped);
}

Device::Current::Current(const Device& device) : device_(device) {
    device.driver_->call(device.driver_->context_push, device.context_);
}

Device::Current::~Current() { device_.leave(); }

void Device::refuse_if_stuck() const {
    if (stuck_)
        throw DeviceStuck("GPU " + std::to_string(ordinal_) +
                          " did not finish earlier work in time, so this process cannot use it any more: end the "
                          "process and start another");
}

void Device::give_up(const char* what, double timeout_s) {
    stuck_ = true;
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", timeout_s);
    throw Timeout(std::string(what) + " on GPU " + std::to_string(ordinal_) + " did not finish within " + seconds +
                  " s: the stream is hung (a mask without room for the kernel?) or busy; this process can't use the "
                  "GPU any more");
}

std::pair<int, int> Device::stream_priorities() const {
    refuse_if_stuck();
    Current current(*this);
    std::pair<int, int> range{0, 0};
    driver_->call(driver_->stream_priority_range, &range.first, &range.second);
    return range;
}

std::uintptr_t Device::create_stream(int priority) const {
    refuse_if_stuck();
    Current current(*this);
    CUstream stream = nullptr;
    driver_->call(driver_->stream_create, &stream, cuda::kStreamNonBlocking, priority);
    return reinterpret_cast<std::uintptr_t>(stream);
}

void Device::destroy_stream(std::uintptr_t stream) const {
    CUstream handle = stream_of(stream);
    if (stuck_) return;  // could wait for ever; and callers clean up while a TimeoutError is on its way
    Current current(*this);
    driver_->call(driver_->stream_destroy, handle);
}

bool Device::synchronize(std::uintptr_t stream, double timeout_s) const {
    CUstream handle = stream_of(stream);
    Current current(*this);
    return wait(handle, timeout_s);
}

Device::Timing Device::begin_timing(std::uintptr_t stream) const {
    CUstream handle = stream_of(stream);
    refuse_if_stuck();
    Current current(*this);
    Timing timing;
    try {
        driver_->call(driver_->event_create, &timing.begin, cuda::kEventDefault);
        driver_->call(driver_->event_create, &timing.end, cuda::kEventDefault);
        driver_->call(driver_->event_record, timing.begin, handle);
    } catch (...) {
        drop_timing(timing);
        throw;
    }
    return timing;
}

double Device::end_timing(std::uintptr_t stream, const Timing& timing, double timeout_s) {
    CUstream handle = stream_of(stream);
    refuse_if_stuck();
    Current current(*this);
    driver_->call(driver_->event_record, timing.end, handle);
    if (!wait(handle, timeout_s)) give_up("what elapsed_ms() timed", timeout_s);
    float milliseconds = 0;
    driver_->call(driver_->event_elapsed, &milliseconds, timing.begin, timing.end);
    return milliseconds;
}

void Device::drop_timing(const Timing& timing) const {
    if (stuck_ || !enter()) return;
    for (CUevent event : {timing.begin, timing.end})
        if (event) driver_->event_destroy.pointer(event);
    leave();
}

}  // namespace conflux
