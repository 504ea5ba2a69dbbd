// Green contexts: the documented way to give streams a part of the SMs, by count.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "device.h"

namespace conflux {

// (fewest SMs of a partition, step between sizes) that keep SMs of a cluster together; nothing where the driver has no
// green contexts. Found by trial splits, because drivers before CUDA 13.1 do not state it.
std::optional<std::pair<unsigned, unsigned>> green_granularity(const Device& device);

// A device in two parts: at least `sms` SMs, and the rest.
class GreenPartition {
public:
    GreenPartition(std::shared_ptr<Device> device, unsigned sms, bool ignore_coscheduling,
                   std::optional<bool> structured);
    ~GreenPartition();
    GreenPartition(const GreenPartition&) = delete;
    GreenPartition& operator=(const GreenPartition&) = delete;

    std::pair<unsigned, unsigned> sm_counts() const { return {counts_[0], counts_[1]}; }
    bool structured() const { return structured_; }
    std::uintptr_t create_stream(int part, int priority);
    void destroy();

private:
    void release() noexcept;

    std::shared_ptr<Device> device_;
    bool structured_ = false;
    bool destroyed_ = false;
    CUgreenCtx contexts_[2] = {nullptr, nullptr};
    unsigned counts_[2] = {0, 0};
    std::vector<CUstream> streams_;
    std::mutex mutex_;
};

}  // namespace conflux
