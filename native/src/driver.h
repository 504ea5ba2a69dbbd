// libcuda, loaded at run time.
#pragma once

#include <string>

#include "cuda_api.h"
#include "errors.h"

namespace conflux {

enum class Need { kRequired, kOptional };

// One function of the driver's ABI; empty if an optional one is missing.
template <class... Parameters>
struct Function {
    Function(void* library, const char* symbol_, Need need = Need::kRequired);

    const char* symbol;
    CUresult (*pointer)(Parameters...);
};

class Driver {
public:
    // Loads the library and calls cuInit. Never unloaded: the driver keeps threads and exit handlers.
    explicit Driver(const std::string& path);
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    const std::string& path() const { return path_; }
    int version() const { return version_; }
    int device_count() const { return device_count_; }
    bool has(const std::string& symbol) const;

    // Calls one function; throws CudaError, or DriverMissing if this driver does not have it.
    template <class... Parameters, class... Arguments>
    void call(const Function<Parameters...>& function, Arguments... arguments) const {
        if (CUresult result = attempt(function, arguments...)) fail(result, function.symbol);
    }

    // The same, but returns the result's code.
    template <class... Parameters, class... Arguments>
    CUresult attempt(const Function<Parameters...>& function, Arguments... arguments) const {
        if (function.pointer == nullptr) lacks(function.symbol);
        return function.pointer(arguments...);
    }

    [[noreturn]] void fail(CUresult result, const char* symbol) const;
    [[noreturn]] void lacks(const char* symbol) const;

private:
    void* library_;  // first: the functions below are looked up in it

public:
    Function<unsigned> init{library_, "cuInit"};
    Function<int*> driver_get_version{library_, "cuDriverGetVersion"};
    Function<CUresult, const char**> get_error_name{library_, "cuGetErrorName"};

    Function<int*> device_get_count{library_, "cuDeviceGetCount"};
    Function<CUdevice*, int> device_get{library_, "cuDeviceGet"};
    Function<char*, int, CUdevice> device_get_name{library_, "cuDeviceGetName"};
    Function<CUuuid*, CUdevice> device_get_uuid{library_, "cuDeviceGetUuid_v2", Need::kOptional};
    Function<int*, int, CUdevice> device_get_attribute{library_, "cuDeviceGetAttribute"};
    Function<std::size_t*, CUdevice> device_total_memory{library_, "cuDeviceTotalMem_v2"};

    Function<CUcontext*, CUdevice> primary_context_retain{library_, "cuDevicePrimaryCtxRetain"};
    Function<CUdevice> primary_context_release{library_, "cuDevicePrimaryCtxRelease_v2"};
    Function<CUcontext> context_push{library_, "cuCtxPushCurrent_v2"};
    Function<CUcontext*> context_pop{library_, "cuCtxPopCurrent_v2"};
    Function<int*, int*> stream_priority_range{library_, "cuCtxGetStreamPriorityRange"};

    Function<CUstream*, unsigned, int> stream_create{library_, "cuStreamCreateWithPriority"};
    Function<CUstream> stream_destroy{library_, "cuStreamDestroy_v2"};
    Function<CUstream> stream_query{library_, "cuStreamQuery"};
    Function<CUevent*, unsigned> event_create{library_, "cuEventCreate"};
    Function<CUevent> event_destroy{library_, "cuEventDestroy_v2"};
    Function<CUevent, CUstream> event_record{library_, "cuEventRecord"};
    Function<float*, CUevent, CUevent> event_elapsed{library_, "cuEventElapsedTime"};

    Function<CUdeviceptr*, std::size_t> memory_allocate{library_, "cuMemAlloc_v2"};
    Function<CUdeviceptr> memory_free{library_, "cuMemFree_v2"};
    Function<void**, std::size_t> host_allocate{library_, "cuMemAllocHost_v2"};
    Function<void*> host_free{library_, "cuMemFreeHost"};
    Function<CUdeviceptr, unsigned, std::size_t, CUstream> memory_set{library_, "cuMemsetD32Async"};
    Function<void*, CUdeviceptr, std::size_t, CUstream> copy_to_host{library_, "cuMemcpyDtoHAsync_v2"};

    Function<CUmodule*, const void*> module_load{library_, "cuModuleLoadData"};
    Function<CUfunction*, CUmodule, const char*> module_get_function{library_, "cuModuleGetFunction"};
    Function<CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**>
        launch{library_, "cuLaunchKernel"};
    Function<CUfunction, int, int> function_set_attribute{library_, "cuFuncSetAttribute", Need::kOptional};
    Function<const LaunchConfig*, CUfunction, void**, void**> launch_ex{library_, "cuLaunchKernelEx", Need::kOptional};
    Function<int*, CUfunction, const LaunchConfig*> max_active_clusters{
        library_, "cuOccupancyMaxActiveClusters", Need::kOptional};

    Function<CUdevice, DevResource*, int> device_get_resource{library_, "cuDeviceGetDevResource", Need::kOptional};
    Function<DevResource*, unsigned*, const DevResource*, DevResource*, unsigned, unsigned> split_by_count{
        library_, "cuDevSmResourceSplitByCount", Need::kOptional};
    Function<DevResource*, unsigned, const DevResource*, DevResource*, unsigned, SmGroupParams*> split_structured{
        library_, "cuDevSmResourceSplit", Need::kOptional};
    Function<CUdevResourceDesc*, DevResource*, unsigned> generate_descriptor{
        library_, "cuDevResourceGenerateDesc", Need::kOptional};
    Function<CUgreenCtx*, CUdevResourceDesc, CUdevice, unsigned> green_create{
        library_, "cuGreenCtxCreate", Need::kOptional};
    Function<CUgreenCtx> green_destroy{library_, "cuGreenCtxDestroy", Need::kOptional};
    Function<CUstream*, CUgreenCtx, unsigned, int> green_stream_create{
        library_, "cuGreenCtxStreamCreate", Need::kOptional};

    bool has_green() const {
        return device_get_resource.pointer && split_by_count.pointer && generate_descriptor.pointer &&
               green_create.pointer && green_destroy.pointer && green_stream_create.pointer;
    }

private:
    std::string path_;
    int version_ = 0;
    int device_count_ = 0;
};

}  // namespace conflux
