#pragma once

#include <stdexcept>
#include <string>

namespace conflux {

// A call of the driver returned an error.
struct CudaError : std::runtime_error {
    CudaError(const std::string& message, std::string name_, int code_, std::string function_)
        : std::runtime_error(message), name(std::move(name_)), code(code_), function(std::move(function_)) {}

    std::string name;
    int code;
    std::string function;
};

// There is no driver, or it lacks something.
struct DriverMissing : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Something on the GPU did not finish in time.
struct Timeout : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A call on a device that has already had a timeout.
struct DeviceStuck : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace conflux
