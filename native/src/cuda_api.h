// The few types and numbers of the CUDA driver's ABI that conflux uses, so that no CUDA toolkit is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conflux {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = std::uint64_t;
using CUcontext = struct ContextHandle*;
using CUstream = struct StreamHandle*;
using CUevent = struct EventHandle*;
using CUmodule = struct ModuleHandle*;
using CUfunction = struct FunctionHandle*;
using CUgreenCtx = struct GreenContextHandle*;
using CUdevResourceDesc = struct ResourceDescriptorHandle*;

namespace cuda {
// Results
constexpr CUresult kSuccess = 0;
constexpr CUresult kInvalidValue = 1;
constexpr CUresult kNotReady = 600;
constexpr CUresult kInvalidClusterSize = 912;

// Attributes of a device
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

// Attribute of a function: clusters of more than eight blocks may be launched
constexpr int kNonPortableClusterSizeAllowed = 14;
// Attribute of a launch: the blocks in a cluster
constexpr unsigned kClusterDimension = 4;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDefault = 0;

constexpr int kResourceInvalid = 0;
constexpr int kResourceSm = 1;
constexpr unsigned kSplitIgnoreCoscheduling = 1;
constexpr unsigned kGreenDefaultStream = 1;
}  // namespace cuda

struct CUuuid {
    unsigned char bytes[16];
};

struct LaunchAttribute {
    unsigned id;
    unsigned padding;
    union {
        struct {
            unsigned x, y, z;
        } cluster;
        char bytes[64];
    } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    CUstream stream;
    LaunchAttribute* attributes;
    unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32);

// A set of SMs. Opaque to its users but for the type and the count; its size has not changed since CUDA 12.4, although
// drivers before 13.1 fill `sm_count` only.
struct DevResource {
    int type;
    unsigned char internal[92];
    struct {
        unsigned sm_count;
        unsigned min_partition;
        unsigned coscheduled_alignment;
        unsigned char rest[28];
    } sm;
    DevResource* next;
};
static_assert(sizeof(DevResource) == 144 && offsetof(DevResource, sm) == 96 && offsetof(DevResource, next) == 136);

// What one group of cuDevSmResourceSplit (CUDA 13.1) asks for.
struct SmGroupParams {
    unsigned sm_count;
    unsigned coscheduled_sms;
    unsigned preferred_coscheduled_sms;
    unsigned flags;
    unsigned reserved[12];
};
static_assert(sizeof(SmGroupParams) == 64);

}  // namespace conflux
