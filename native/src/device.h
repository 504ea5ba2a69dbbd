// One GPU: streams, waits with a deadline, and probes that say where blocks run.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"

namespace conflux {

// A stream as Python holds it. Refuses the default streams' handles, which are no pointers.
CUstream stream_of(std::uintptr_t handle);

class Device {
public:
    Device(std::shared_ptr<Driver> driver, int ordinal);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const Driver& driver() const { return *driver_; }
    int ordinal() const { return ordinal_; }
    CUdevice handle() const { return handle_; }
    const std::string& name() const { return name_; }
    const std::string& uuid() const { return uuid_; }
    std::pair<int, int> compute_capability() const { return capability_; }
    int sm_count() const { return sm_count_; }
    std::size_t total_memory_bytes() const { return total_memory_; }
    bool stuck() const { return stuck_; }

    // (least, greatest); a greater priority is a smaller number.
    std::pair<int, int> stream_priorities() const;
    std::uintptr_t create_stream(int priority) const;
    void destroy_stream(std::uintptr_t stream) const;
    bool synchronize(std::uintptr_t stream, double timeout_s) const;

    std::vector<unsigned> smid_histogram(std::uintptr_t stream, double timeout_s, unsigned blocks_per_sm);
    std::vector<std::vector<unsigned>> cluster_samples(std::uintptr_t stream, unsigned cluster_size, unsigned clusters,
                                                       double timeout_s);
    int max_active_clusters(unsigned cluster_size);

    void launch_spin(std::uintptr_t stream, unsigned iterations, unsigned blocks, unsigned threads);
    void launch_read(std::uintptr_t stream, std::size_t bytes, unsigned repeats, unsigned blocks, unsigned threads);
    void hold(std::uintptr_t stream, double milliseconds, unsigned blocks);

    // A pair of events round launches that the caller makes between the two calls.
    struct Timing {
        CUevent begin = nullptr, end = nullptr;
    };
    Timing begin_timing(std::uintptr_t stream) const;
    double end_timing(std::uintptr_t stream, const Timing& timing, double timeout_s);
    void drop_timing(const Timing& timing) const;

    // The primary context current on this thread, and the caller's own again afterwards.
    class Current {
    public:
        explicit Current(const Device& device);
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

    private:
        const Device& device_;
    };

    // The same without exceptions, for cleaning up: false if the driver would not.
    bool enter() const noexcept;
    void leave() const noexcept;

    void refuse_if_stuck() const;

private:
    struct Kernels {
        CUfunction smid, hold, spin, read;
    };

    bool wait(CUstream stream, double timeout_s) const;
    [[noreturn]] void give_up(const char* what, double timeout_s);
    // Everything from here on needs the turn.
    std::unique_lock<std::mutex> take_turn();
    const Kernels& kernels();
    CUfunction cluster_kernel(unsigned cluster_size);
    // Runs on probe memory of `words` 32-bit words, set to `fill` before: launch, copy back, wait.
    template <class Launch>
    std::vector<unsigned> probe(const char* what, CUstream stream, std::size_t words, unsigned fill, double timeout_s,
                                Launch launch);
    void launch(CUfunction kernel, unsigned blocks, unsigned threads, CUstream stream, void** parameters) const;
    CUdeviceptr sink();

    std::shared_ptr<Driver> driver_;
    int ordinal_;
    CUdevice handle_ = 0;
    CUcontext context_ = nullptr;
    std::string name_, uuid_;
    std::pair<int, int> capability_{0, 0};
    int sm_count_ = 0;
    std::size_t total_memory_ = 0;
    std::atomic<bool> stuck_{false};

    std::mutex turn_;  // one probe at a time, and all below
    bool loaded_ = false;
    Kernels kernels_{};
    CUfunction cluster_ = nullptr;
    std::size_t probe_words_ = 0;
    CUdeviceptr probe_memory_ = 0;
    unsigned* probe_copy_ = nullptr;
    CUdeviceptr sink_ = 0;
    CUdeviceptr source_ = 0;
    std::size_t source_bytes_ = 0;
    std::vector<CUdeviceptr> retired_;  // smaller sources, which a kernel may still be reading
};

}  // namespace conflux
