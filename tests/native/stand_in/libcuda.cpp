// A stand-in for libcuda.so.1, for tests on machines without a GPU. It exports what conflux calls, acts on the probe
// kernels by their names, and misbehaves as told by its settings (see settings.h and tests/native/standin.py).
#include "api.h"
#include "cuda_api.h"

using namespace stand_in;
using conflux::LaunchConfig;

namespace {

std::vector<void*> retained;  // primary contexts, by device

struct Event {
    std::uint64_t at = 0;
};

std::uint64_t limit() { return static_cast<std::uint64_t>(settings.number("MEMORY_GIB", 139)) << 30; }

}  // namespace

extern "C" {

// For tests
void stand_in_set(const char* name, const char* value) {
    std::lock_guard<std::recursive_mutex> locked(lock);
    if (value) settings.set[name] = value;
    else settings.set.erase(name);
}
void stand_in_reset() {
    std::lock_guard<std::recursive_mutex> locked(lock);
    settings.set.clear();
    calls.clear();
    live.clear();
    sticky = 0;
}
int stand_in_calls(const char* symbol) { return calls[symbol]; }
int stand_in_live(const char* kind) { return live[kind]; }
int stand_in_context_depth() { return static_cast<int>(current.size()); }
int stand_in_priority(Stream* stream) { return stream->priority; }

int cuInit(unsigned) { ENTER(enter, "cuInit"); return kOk; }
int cuDriverGetVersion(int* version) {
    ENTER(enter, "cuDriverGetVersion");
    *version = static_cast<int>(settings.number("VERSION", 13000));
    return kOk;
}
int cuGetErrorName(int code, const char** name) {
    static const std::map<int, const char*> names = {
        {1, "CUDA_ERROR_INVALID_VALUE"},     {2, "CUDA_ERROR_OUT_OF_MEMORY"},     {100, "CUDA_ERROR_NO_DEVICE"},
        {201, "CUDA_ERROR_INVALID_CONTEXT"}, {400, "CUDA_ERROR_INVALID_HANDLE"},  {500, "CUDA_ERROR_NOT_FOUND"},
        {600, "CUDA_ERROR_NOT_READY"},       {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
        {915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"}};
    const auto found = names.find(code);
    *name = found == names.end() ? nullptr : found->second;
    return found == names.end() ? kInvalidValue : kOk;
}
int cuDeviceGetCount(int* count) {
    ENTER(enter, "cuDeviceGetCount");
    *count = static_cast<int>(settings.number("DEVICES", 1));
    return kOk;
}
int cuDeviceGet(int* device, int ordinal) { ENTER(enter, "cuDeviceGet"); *device = ordinal; return kOk; }
int cuDeviceGetName(char* name, int length, int) {
    ENTER(enter, "cuDeviceGetName");
    std::strncpy(name, settings.text("NAME", "NVIDIA Stand-in").c_str(), static_cast<std::size_t>(length));
    return kOk;
}
int cuDeviceGetUuid_v2(conflux::CUuuid* uuid, int device) {
    ENTER(enter, "cuDeviceGetUuid_v2");
    for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<unsigned char>(i);
    uuid->bytes[15] = static_cast<unsigned char>(device);
    return kOk;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    ENTER(enter, "cuDeviceGetAttribute");
    const int capability = static_cast<int>(settings.number("CAPABILITY", 90));
    switch (attribute) {
        case 16: *value = 2 * tpc_count(); return kOk;
        case 75: *value = capability / 10; return kOk;
        case 76: *value = capability % 10; return kOk;
        default: return kInvalidValue;
    }
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int) { ENTER(enter, "cuDeviceTotalMem_v2"); *bytes = limit(); return kOk; }

int cuDevicePrimaryCtxRetain(void** context, int device) {
    ENTER(enter, "cuDevicePrimaryCtxRetain");
    while (retained.size() <= static_cast<std::size_t>(device)) retained.push_back(new int);
    *context = retained[static_cast<std::size_t>(device)];
    ++live["contexts"];
    return kOk;
}
int cuDevicePrimaryCtxRelease_v2(int) { ENTER(enter, "cuDevicePrimaryCtxRelease_v2"); --live["contexts"]; return kOk; }
int cuCtxPushCurrent_v2(void* context) { ENTER(enter, "cuCtxPushCurrent_v2"); current.push_back(context); return kOk; }
int cuCtxPopCurrent_v2(void** context) {
    ENTER(enter, "cuCtxPopCurrent_v2");
    if (current.empty()) return 201;
    *context = current.back();
    current.pop_back();
    return kOk;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER(enter_context, "cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return kOk;
}

int cuStreamCreateWithPriority(Stream** stream, unsigned, int priority) {
    ENTER(enter_context, "cuStreamCreateWithPriority");
    *stream = new_stream(priority, nullptr);
    ++live["streams"];
    return kOk;
}
int cuStreamDestroy_v2(Stream* stream) {
    ENTER(enter_context, "cuStreamDestroy_v2");
    OF_STREAM(stream);
    streams.erase(stream);  // its memory stays, so that a use after this shows as an error and not as a crash
    --live["streams"];
    return kOk;
}
int cuStreamQuery(Stream* stream) {
    ENTER(enter_context, "cuStreamQuery");
    OF_STREAM(stream);
    if (settings.number("RELEASE", 0)) return kOk;
    return stream->hung || stream->busy_until > now_ns() ? kNotReady : kOk;
}
int cuEventCreate(Event** event, unsigned) {
    ENTER(enter_context, "cuEventCreate");
    *event = new Event;
    ++live["events"];
    return kOk;
}
int cuEventDestroy_v2(Event* event) { ENTER(enter_context, "cuEventDestroy_v2"); delete event; --live["events"]; return kOk; }
int cuEventRecord(Event* event, Stream* stream) {
    ENTER(enter_context, "cuEventRecord");
    OF_STREAM(stream);
    event->at = std::max(now_ns(), stream->busy_until);
    return kOk;
}
int cuEventElapsedTime(float* milliseconds, Event* begin, Event* end) {
    ENTER(enter_context, "cuEventElapsedTime");
    *milliseconds = static_cast<float>(static_cast<double>(end->at - begin->at) * 1e-6);
    return kOk;
}

int cuMemAlloc_v2(std::uint64_t* memory, std::size_t bytes) {
    ENTER(enter_context, "cuMemAlloc_v2");
    if (bytes > limit()) return 2;
    *memory = reinterpret_cast<std::uint64_t>(std::calloc(1, bytes));
    ++live["memory"];
    return *memory ? kOk : 2;
}
int cuMemFree_v2(std::uint64_t memory) {
    ENTER(enter_context, "cuMemFree_v2");
    std::free(reinterpret_cast<void*>(memory));
    --live["memory"];
    return kOk;
}
int cuMemAllocHost_v2(void** memory, std::size_t bytes) {
    ENTER(enter_context, "cuMemAllocHost_v2");
    *memory = std::calloc(1, bytes);
    ++live["host"];
    return kOk;
}
int cuMemFreeHost(void* memory) { ENTER(enter_context, "cuMemFreeHost"); std::free(memory); --live["host"]; return kOk; }
int cuMemsetD32Async(std::uint64_t memory, unsigned value, std::size_t words, Stream* stream) {
    ENTER(enter_context, "cuMemsetD32Async");
    OF_STREAM(stream);
    if (start(*stream)) std::fill_n(reinterpret_cast<unsigned*>(memory), words, value);
    return sticky;
}
int cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t bytes, Stream* stream) {
    ENTER(enter_context, "cuMemcpyDtoHAsync_v2");
    OF_STREAM(stream);
    if (start(*stream)) std::memcpy(to, reinterpret_cast<void*>(from), bytes);
    return sticky;
}

int cuModuleLoadData(void** module, const void* image) {
    ENTER(enter_context, "cuModuleLoadData");
    *module = new std::string(static_cast<const char*>(image));
    return kOk;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    ENTER(enter_context, "cuModuleGetFunction");
    if (static_cast<std::string*>(module)->find(".entry " + std::string(name) + "(") == std::string::npos) return 500;
    *function = new std::string(name);
    return kOk;
}
int cuFuncSetAttribute(void*, int, int) { ENTER(enter_context, "cuFuncSetAttribute"); return kOk; }
int cuLaunchKernel(void* function, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                   Stream* stream, void** parameters, void**) {
    ENTER(enter_context, "cuLaunchKernel");
    OF_STREAM(stream);
    return run(*stream, {*static_cast<std::string*>(function), x, threads, 1, parameters});
}
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void**) {
    ENTER(enter_context, "cuLaunchKernelEx");
    auto* stream = reinterpret_cast<Stream*>(config->stream);
    OF_STREAM(stream);
    if (config->attribute_count != 1 || config->attributes->id != 4) return kInvalidValue;
    const unsigned cluster = config->attributes->value.cluster.x;
    if (config->grid[0] % cluster) return kInvalidValue;
    return run(*stream, {*static_cast<std::string*>(function), config->grid[0], config->block[0], cluster, parameters});
}
int cuOccupancyMaxActiveClusters(int* count, void*, const LaunchConfig* config) {
    ENTER(enter_context, "cuOccupancyMaxActiveClusters");
    *count = 0;
    for (const auto& group : gpcs()) *count += static_cast<int>(2 * group.size() / config->attributes->value.cluster.x);
    return kOk;
}
}
