#include "green.h"

#include <stdexcept>
#include <string>

namespace conflux {
namespace {

constexpr unsigned kSmsOfTpc = 2;

DevResource all_sms(const Device& device) {
    const Driver& cuda = device.driver();
    DevResource all{};
    cuda.call(cuda.device_get_resource, device.handle(), &all, cuda::kResourceSm);
    return all;
}

// One group of at least `sms` SMs, and what remains.
std::pair<DevResource, DevResource> split_by_count(const Device& device, const DevResource& all, unsigned sms,
                                                   unsigned flags) {
    const Driver& cuda = device.driver();
    DevResource group{}, rest{};
    unsigned groups = 1;
    cuda.call(cuda.split_by_count, &group, &groups, &all, &rest, flags, sms);
    if (groups != 1) throw std::runtime_error("the driver made no group of " + std::to_string(sms) + " SMs");
    return {group, rest};
}

std::pair<DevResource, DevResource> split_structured(const Device& device, const DevResource& all, unsigned sms,
                                                     unsigned together) {
    const Driver& cuda = device.driver();
    SmGroupParams wish{};
    wish.sm_count = sms;
    wish.coscheduled_sms = together;
    DevResource group{}, rest{};
    cuda.call(cuda.split_structured, &group, 1u, &all, &rest, 0u, &wish);
    return {group, rest};
}

std::pair<unsigned, unsigned> granularity(const Device& device, const DevResource& all) {
    const unsigned least = split_by_count(device, all, 1, 0).first.sm.sm_count;
    if (least + 1 >= all.sm.sm_count) return {least, least};
    return {least, split_by_count(device, all, least + 1, 0).first.sm.sm_count - least};
}

}  // namespace

std::optional<std::pair<unsigned, unsigned>> green_granularity(const Device& device) {
    if (!device.driver().has_green()) return std::nullopt;
    device.refuse_if_stuck();
    Device::Current current(device);
    return granularity(device, all_sms(device));
}

GreenPartition::GreenPartition(std::shared_ptr<Device> device, unsigned sms, bool ignore_coscheduling,
                               std::optional<bool> structured)
    : device_(std::move(device)) {
    const Driver& cuda = device_->driver();
    device_->refuse_if_stuck();
    structured_ = structured.value_or(cuda.split_structured.pointer != nullptr);
    Device::Current current(*device_);
    const DevResource all = all_sms(*device_);
    const unsigned total = all.sm.sm_count;
    const auto [least, step] = ignore_coscheduling ? std::pair{kSmsOfTpc, kSmsOfTpc} : granularity(*device_, all);
    const unsigned size = sms <= least ? least : least + (sms - least + step - 1) / step * step;
    if (sms < 1 || size >= total)
        throw std::invalid_argument("a part of " + std::to_string(sms) + " SMs is not to be had: the GPU has " +
                                    std::to_string(total) + ", parts begin at " + std::to_string(least) +
                                    " and grow by " + std::to_string(step) + ", and the other part needs some too");
    auto [group, rest] =
        structured_ ? split_structured(*device_, all, size, step)
                    : split_by_count(*device_, all, size, ignore_coscheduling ? cuda::kSplitIgnoreCoscheduling : 0);
    if (rest.type != cuda::kResourceSm || rest.sm.sm_count == 0)
        throw std::runtime_error("the driver's split left no SMs for the other part");
    try {
        DevResource* parts[] = {&group, &rest};
        for (int part = 0; part < 2; ++part) {
            CUdevResourceDesc description = nullptr;
            cuda.call(cuda.generate_descriptor, &description, parts[part], 1u);
            cuda.call(cuda.green_create, &contexts_[part], description, device_->handle(), cuda::kGreenDefaultStream);
            counts_[part] = parts[part]->sm.sm_count;
        }
    } catch (...) {
        release();
        throw;
    }
}

GreenPartition::~GreenPartition() { destroy(); }

std::uintptr_t GreenPartition::create_stream(int part, int priority) {
    if (part != 0 && part != 1) throw std::invalid_argument("part must be 0 or 1");
    device_->refuse_if_stuck();
    std::lock_guard<std::mutex> lock(mutex_);
    if (destroyed_) throw std::runtime_error("this GreenPartition has been destroyed");
    const Driver& cuda = device_->driver();
    Device::Current current(*device_);
    streams_.reserve(streams_.size() + 1);
    CUstream stream = nullptr;
    cuda.call(cuda.green_stream_create, &stream, contexts_[part], cuda::kStreamNonBlocking, priority);
    streams_.push_back(stream);
    return reinterpret_cast<std::uintptr_t>(stream);
}

void GreenPartition::destroy() {
    std::lock_guard<std::mutex> lock(mutex_);
    release();
}

void GreenPartition::release() noexcept {
    if (destroyed_) return;
    destroyed_ = true;
    if (device_->stuck()) return;  // see Device::~Device
    const Driver& cuda = device_->driver();
    const bool entered = device_->enter();
    for (CUstream stream : streams_) cuda.stream_destroy.pointer(stream);
    for (CUgreenCtx context : contexts_)
        if (context) cuda.green_destroy.pointer(context);
    streams_.clear();
    if (entered) device_->leave();
}

}  // namespace conflux
