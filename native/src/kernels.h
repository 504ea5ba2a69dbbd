// Names of the probe kernels and the order of their parameters. The stand-in driver of the tests acts on these.
#pragma once

namespace conflux::kernels {

// Threads per block of the kernels that ask where a block runs. Two such blocks fill an SM's thread slots (one on chips
// with 1,536 slots), so a grid larger than the GPU leaves no SM out.
constexpr unsigned kProbeThreads = 1024;

// Counts its blocks by SM: counters[min(smid, capacity)] += 1; a block stays for hold_ns.
// (u64 counters, u32 capacity, u64 hold_ns)
constexpr char kSmid[] = "conflux_smid";

// Blocks that only wait. (u64 hold_ns)
constexpr char kHold[] = "conflux_hold";

// Multiply-adds on registers: each thread runs kSpinFmasPerIteration of them per iteration, in four independent chains.
// (u64 sink, u32 iterations)
constexpr char kSpin[] = "conflux_spin";
constexpr unsigned kSpinFmasPerIteration = 16;

// Reads `vectors` × 16 bytes `repeats` times. (u64 source, u64 vectors, u32 repeats, u64 sink)
constexpr char kRead[] = "conflux_read";

// out[cluster × cluster size + rank] = smid; a block stays for hold_ns. Launched in clusters. (u64 out, u64 hold_ns)
constexpr char kCluster[] = "conflux_cluster";

}  // namespace conflux::kernels
