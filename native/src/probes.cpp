// Device's kernels: loading, launching, reading back.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>

#include "device.h"
#include "kernels.h"
#include "ptx.h"

namespace conflux {
namespace {

using Clock = std::chrono::steady_clock;

// Long against the microseconds in which a grid's blocks are started, so that a block that could start elsewhere has.
constexpr std::uint64_t kStayNs = 20'000;
constexpr std::size_t kLeastCounters = 1024;
constexpr unsigned kNowhere = 0xffffffffu;

void require(bool right, const char* message) {
    if (!right) throw std::invalid_argument(message);
}

void check_launch(unsigned blocks, unsigned threads) {
    require(blocks >= 1 && blocks <= 0x7fffffffu, "blocks must be at least 1");
    require(threads >= 1 && threads <= 1024, "threads must be 1..1024");
}

}  // namespace

bool Device::wait(CUstream stream, double timeout_s) const {
    require(timeout_s >= 0, "timeout_s must be 0 or more");  // false for NaN too
    const double seconds = std::min(timeout_s, 1e9);
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    for (int polls = 0;; ++polls) {
        const CUresult result = driver_->stream_query.pointer(stream);
        if (result == cuda::kSuccess) return true;
        if (result != cuda::kNotReady) driver_->fail(result, driver_->stream_query.symbol);
        if (Clock::now() >= deadline) return false;
        if (polls < 100)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

std::unique_lock<std::mutex> Device::take_turn() {
    std::unique_lock<std::mutex> lock(turn_);
    refuse_if_stuck();  // only now: whoever had the turn before may have found out
    return lock;
}

const Device::Kernels& Device::kernels() {
    if (!loaded_) {
        CUmodule module = nullptr;
        driver_->call(driver_->module_load, &module, static_cast<const void*>(ptx::kBase));
        driver_->call(driver_->module_get_function, &kernels_.smid, module, kernels::kSmid);
        driver_->call(driver_->module_get_function, &kernels_.hold, module, kernels::kHold);
        driver_->call(driver_->module_get_function, &kernels_.spin, module, kernels::kSpin);
        driver_->call(driver_->module_get_function, &kernels_.read, module, kernels::kRead);
        loaded_ = true;
    }
    return kernels_;
}

CUfunction Device::cluster_kernel(unsigned cluster_size) {
    require(cluster_size >= 1 && cluster_size <= 16, "cluster_size must be 1..16");
    require(capability_.first >= 9, "clusters need compute capability 9.0 (Hopper) or newer");
    if (cluster_ == nullptr) {
        CUmodule module = nullptr;
        CUfunction kernel = nullptr;
        driver_->call(driver_->module_load, &module, static_cast<const void*>(ptx::kClusters));
        driver_->call(driver_->module_get_function, &kernel, module, kernels::kCluster);
        driver_->call(driver_->function_set_attribute, kernel, cuda::kNonPortableClusterSizeAllowed, 1);
        cluster_ = kernel;
    }
    return cluster_;
}

void Device::launch(CUfunction kernel, unsigned blocks, unsigned threads, CUstream stream, void** parameters) const {
    driver_->call(driver_->launch, kernel, blocks, 1u, 1u, threads, 1u, 1u, 0u, stream, parameters, nullptr);
}

CUdeviceptr Device::sink() {
    if (sink_ == 0) driver_->call(driver_->memory_allocate, &sink_, std::size_t{256});
    return sink_;
}

template <class Launch>
std::vector<unsigned> Device::probe(const char* what, CUstream stream, std::size_t words, unsigned fill,
                                    double timeout_s, Launch launch) {
    const Driver& cuda = *driver_;
    if (words > probe_words_) {
        // No probe is running (they take turns), so the old memory is free to go.
        probe_words_ = 0;
        if (probe_memory_) cuda.call(cuda.memory_free, std::exchange(probe_memory_, 0));
        if (probe_copy_) cuda.call(cuda.host_free, static_cast<void*>(std::exchange(probe_copy_, nullptr)));
        cuda.call(cuda.memory_allocate, &probe_memory_, words * sizeof(unsigned));
        void* copy = nullptr;
        cuda.call(cuda.host_allocate, &copy, words * sizeof(unsigned));
        probe_copy_ = static_cast<unsigned*>(copy);
        probe_words_ = words;
    }
    cuda.call(cuda.memory_set, probe_memory_, fill, words, stream);
    launch(probe_memory_);
    // Into page-locked memory: a copy to other memory would block, whatever the deadline.
    cuda.call(cuda.copy_to_host, static_cast<void*>(probe_copy_), probe_memory_, words * sizeof(unsigned), stream);
    if (!wait(stream, timeout_s)) give_up(what, timeout_s);
    return std::vector<unsigned>(probe_copy_, probe_copy_ + words);
}

std::vector<unsigned> Device::smid_histogram(std::uintptr_t stream, double timeout_s, unsigned blocks_per_sm) {
    CUstream handle = stream_of(stream);
    require(timeout_s >= 0, "timeout_s must be 0 or more");
    require(blocks_per_sm >= 1 && blocks_per_sm <= 1024, "blocks_per_sm must be 1..1024");
    const auto turn = take_turn();
    Current current(*this);
    const std::size_t sms = sm_count_;
    unsigned capacity = static_cast<unsigned>(std::max(kLeastCounters, 2 * sms));
    std::uint64_t stay_ns = kStayNs;
    CUfunction kernel = kernels().smid;
    auto counts = probe("smid_histogram()", handle, capacity + 1, 0, timeout_s, [&](CUdeviceptr counters) {
        void* parameters[] = {&counters, &capacity, &stay_ns};
        launch(kernel, blocks_per_sm * static_cast<unsigned>(sms), kernels::kProbeThreads, handle, parameters);
    });
    if (counts.back() != 0) throw std::runtime_error("a block ran on an SM whose id is beyond what was expected");
    while (counts.size() > sms && counts.back() == 0) counts.pop_back();
    return counts;
}

std::vector<std::vector<unsigned>> Device::cluster_samples(std::uintptr_t stream, unsigned cluster_size,
                                                           unsigned clusters, double timeout_s) {
    CUstream handle = stream_of(stream);
    require(timeout_s >= 0, "timeout_s must be 0 or more");
    require(clusters >= 1 && clusters <= 65536, "clusters must be 1..65536");
    const auto turn = take_turn();
    Current current(*this);
    CUfunction kernel = cluster_kernel(cluster_size);
    std::uint64_t stay_ns = kStayNs;
    LaunchAttribute attribute{};
    attribute.id = cuda::kClusterDimension;
    attribute.value.cluster = {cluster_size, 1, 1};
    const LaunchConfig config{{clusters * cluster_size, 1, 1}, {kernels::kProbeThreads, 1, 1}, 0, handle, &attribute, 1};
    const auto seen = probe("cluster_samples()", handle, std::size_t{clusters} * cluster_size, kNowhere, timeout_s,
                            [&](CUdeviceptr out) {
                                void* parameters[] = {&out, &stay_ns};
                                driver_->call(driver_->launch_ex, &config, kernel, parameters, nullptr);
                            });
    std::vector<std::vector<unsigned>> samples;
    samples.reserve(clusters);
    for (unsigned i = 0; i < clusters; ++i) {
        const auto first = seen.begin() + std::size_t{i} * cluster_size;
        samples.emplace_back(first, first + cluster_size);
        if (std::count(first, first + cluster_size, kNowhere))
            throw std::runtime_error("a block of a cluster left no trace: the probe did not run as launched");
    }
    return samples;
}

int Device::max_active_clusters(unsigned cluster_size) {
    const auto turn = take_turn();
    Current current(*this);
    CUfunction kernel = cluster_kernel(cluster_size);
    LaunchAttribute attribute{};
    attribute.id = cuda::kClusterDimension;
    attribute.value.cluster = {cluster_size, 1, 1};
    const LaunchConfig config{{cluster_size, 1, 1}, {kernels::kProbeThreads, 1, 1}, 0, nullptr, &attribute, 1};
    int fit = 0;
    const CUresult result = driver_->attempt(driver_->max_active_clusters, &fit, kernel, &config);
    if (result == cuda::kInvalidClusterSize) return 0;
    if (result != cuda::kSuccess) driver_->fail(result, driver_->max_active_clusters.symbol);
    return fit;
}

void Device::launch_spin(std::uintptr_t stream, unsigned iterations, unsigned blocks, unsigned threads) {
    CUstream handle = stream_of(stream);
    check_launch(blocks, threads);
    const auto turn = take_turn();
    Current current(*this);
    CUdeviceptr out = sink();
    void* parameters[] = {&out, &iterations};
    launch(kernels().spin, blocks, threads, handle, parameters);
}

void Device::launch_read(std::uintptr_t stream, std::size_t bytes, unsigned repeats, unsigned blocks,
                         unsigned threads) {
    CUstream handle = stream_of(stream);
    check_launch(blocks, threads);
    require(bytes >= 16 && bytes % 16 == 0, "bytes must be a positive multiple of 16");
    const auto turn = take_turn();
    Current current(*this);
    if (bytes > source_bytes_) {
        CUdeviceptr larger = 0;
        driver_->call(driver_->memory_allocate, &larger, bytes);
        if (source_) retired_.push_back(source_);
        source_ = larger;
        source_bytes_ = bytes;
    }
    CUdeviceptr out = sink();
    std::uint64_t vectors = bytes / 16;
    void* parameters[] = {&source_, &vectors, &repeats, &out};
    launch(kernels().read, blocks, threads, handle, parameters);
}

void Device::hold(std::uintptr_t stream, double milliseconds, unsigned blocks) {
    CUstream handle = stream_of(stream);
    check_launch(blocks, 32);
    require(milliseconds >= 0 && milliseconds <= 3.6e6, "milliseconds must be 0..3,600,000 (an hour)");
    const auto turn = take_turn();
    Current current(*this);
    auto stay_ns = static_cast<std::uint64_t>(std::llround(milliseconds * 1e6));
    void* parameters[] = {&stay_ns};
    launch(kernels().hold, blocks, 32, handle, parameters);
}

}  // namespace conflux
