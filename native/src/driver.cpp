#include "driver.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>

namespace conflux {
namespace {

void* open_library(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        throw DriverMissing("the NVIDIA driver's library " + path + " cannot be loaded (" +
                            (reason ? reason : "no reason given") +
                            "): install the driver, or in a container mount it (docker run --gpus all)");
    }
    return library;
}

std::string resolved(const void* function, const std::string& path) {
    Dl_info info;
    if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return path;
    char real[PATH_MAX];
    return realpath(info.dli_fname, real) ? real : info.dli_fname;
}

// The name in NVIDIA's documentation: "cuMemAlloc" for the symbol "cuMemAlloc_v2".
std::string documented(const char* symbol) {
    std::string name = symbol;
    const auto end = name.rfind("_v");
    return end == std::string::npos ? name : name.substr(0, end);
}

const char* advice(CUresult result) {
    switch (result) {
        case 2: return "the GPU's memory is full";
        case 34: return "this libcuda is a toolkit's stub: put the driver's own library first in the search path";
        case 46: return "another process has the GPU for itself, or it needs a reset";
        case 100: return "the driver sees no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES";
        case 222: return "the driver is too old for this probe";
        case 700: case 715: case 716: case 717: case 718: case 719:
            return "the CUDA context is broken: this process must end";
        case 801: return "this GPU, driver or virtual machine does not offer it";
        case 802: case 803: return "kernel module and libcuda disagree: restart the machine or its fabric manager";
        default: return nullptr;
    }
}

}  // namespace

template <class... Parameters>
Function<Parameters...>::Function(void* library, const char* symbol_, Need need)
    : symbol(symbol_), pointer(reinterpret_cast<CUresult (*)(Parameters...)>(dlsym(library, symbol_))) {
    if (pointer == nullptr && need == Need::kRequired)
        throw DriverMissing(std::string("the NVIDIA driver lacks ") + symbol_ +
                            ": it is too old, or the library loaded is not libcuda; install a current driver");
}

Driver::Driver(const std::string& path) : library_(open_library(path)) {
    path_ = resolved(reinterpret_cast<const void*>(init.pointer), path);
    call(init, 0u);
    call(driver_get_version, &version_);
    call(device_get_count, &device_count_);
}

bool Driver::has(const std::string& symbol) const { return dlsym(library_, symbol.c_str()) != nullptr; }

void Driver::fail(CUresult result, const char* symbol) const {
    const char* known = nullptr;
    get_error_name.pointer(result, &known);
    const std::string name = known ? known : "CUDA_ERROR_" + std::to_string(result);
    const std::string function = documented(symbol);
    std::string message = function + " failed: " + name + " (" + std::to_string(result) + ")";
    if (const char* hint = advice(result)) message += std::string("; ") + hint;
    throw CudaError(message, name, result, function);
}

void Driver::lacks(const char* symbol) const {
    throw DriverMissing("the NVIDIA driver " + path_ + " lacks " + symbol +
                        ": what was asked for needs a newer driver (this one is for CUDA " +
                        std::to_string(version_ / 1000) + "." + std::to_string(version_ % 1000 / 10) + ")");
}

}  // namespace conflux
