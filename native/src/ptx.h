// The probes as PTX: text that every driver compiles for its own GPU, so that no CUDA toolkit is needed to build.
#pragma once

namespace conflux::ptx {

extern const char kBase[];      // kSmid, kHold, kSpin, kRead: compute capability 6.0 and newer
extern const char kClusters[];  // kCluster: compute capability 9.0 and newer

}  // namespace conflux::ptx
