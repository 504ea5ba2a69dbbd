// A pretended GPU: streams whose structures hold a mask at some offset, and kernels that are carried out on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <time.h>

#include "kernels.h"
#include "settings.h"

namespace stand_in {

constexpr int kOk = 0, kInvalidValue = 1, kNotReady = 600, kIllegalAddress = 700;
constexpr std::size_t kStructureBytes = 8192;

inline Settings settings;
inline std::recursive_mutex lock;
inline int sticky = 0;  // an error that every later call of the context returns

inline std::uint64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
}

inline int tpc_count() { return static_cast<int>(settings.number("TPCS", 66)); }

// The TPCs of each GPC: an H200's as recorded, or GPCS="0,1,2;3,4,5".
inline std::vector<std::vector<int>> gpcs() {
    const std::string recorded =
        "0,8,16,24;1,9,17,25,32,39,46,53;2,10,18,26,33,40,47,54;3,11,19,27,34,41,48,55;4,12,20,28,35,42,49,56;"
        "5,13,21,29,36,43,50,57;6,14,22,30,37,44,51,58,60;7,15,23,31,38,45,52,59,61;62;63;64;65";
    std::vector<std::vector<int>> groups;
    for (const std::string& group : parts(settings.text("GPCS", recorded), ';')) {
        groups.emplace_back();
        for (const std::string& tpc : parts(group, ','))
            if (std::stoi(tpc) < tpc_count()) groups.back().push_back(std::stoi(tpc));
    }
    return groups;
}

using Sms = std::vector<int>;

struct Stream {
    unsigned char* structure;  // first, as in the driver's own
    unsigned char* pristine;
    const Sms* green = nullptr;  // the SMs of its green context
    bool hung = false;
    std::uint64_t busy_until = 0;
    int priority = 0;
};

inline std::set<Stream*> streams;
inline std::uint64_t launches = 0;

inline long mask_offset() { return settings.number("OFFSET", 0x51c); }

inline Stream* new_stream(int priority, const Sms* green) {
    auto* stream = new Stream{};
    stream->structure = static_cast<unsigned char*>(std::calloc(1, kStructureBytes));
    // Pointers here and there, zeros between them.
    for (std::uint64_t i = 0; i < kStructureBytes / 8; i += 7) {
        const std::uint64_t pointer = 0x7f0000000000u + i * 64;
        std::memcpy(stream->structure + 8 * i, &pointer, 8);
    }
    if (mask_offset() >= 0) std::memset(stream->structure + mask_offset(), 0, 20);
    stream->pristine = static_cast<unsigned char*>(std::malloc(kStructureBytes));
    std::memcpy(stream->pristine, stream->structure, kStructureBytes);
    stream->green = green;
    stream->priority = priority;
    streams.insert(stream);
    return stream;
}

inline std::uint32_t word(const unsigned char* bytes, long offset) {
    std::uint32_t value;
    std::memcpy(&value, bytes + offset, 4);
    return value;
}

// The TPCs that the mask at `offset` leaves; all of them if there is none.
inline std::set<int> masked(const Stream& stream, long offset) {
    std::set<int> enabled;
    const bool active = offset >= 0 && word(stream.structure, offset) != 0;
    for (int tpc = 0; tpc < tpc_count(); ++tpc)
        if (!active || !(word(stream.structure, offset + 4 + tpc / 32 * 4) >> (tpc % 32) & 1)) enabled.insert(tpc);
    return enabled;
}

inline Sms enabled_sms(const Stream& stream) {
    std::set<int> tpcs = masked(stream, mask_offset());
    // A place that acts like a mask, but on all streams at once.
    const long shared = settings.number("SHARED_OFFSET", -1);
    if (shared >= 0)
        for (const Stream* other : streams) {
            std::set<int> left;
            for (int tpc : masked(*other, shared))
                if (tpcs.count(tpc)) left.insert(tpc);
            tpcs = left;
        }
    Sms sms;
    for (int tpc : tpcs)
        for (int sm : {2 * tpc, 2 * tpc + 1})
            if (!stream.green || std::count(stream.green->begin(), stream.green->end(), sm)) sms.push_back(sm);
    return sms;
}

// What changed words outside of the mask do, as set by CRASH, HANG and ERROR (offsets) and POINTERS (a word that was not
// zero): "crash", "hang", "error" or nothing.
inline void suffer_damage(Stream& stream) {
    const std::string crash = settings.text("CRASH"), hang = settings.text("HANG"), error = settings.text("ERROR");
    const std::string pointers = settings.text("POINTERS");
    const long shared = settings.number("SHARED_OFFSET", -1);
    for (long at = 0; at < static_cast<long>(kStructureBytes); at += 4) {
        if (word(stream.structure, at) == word(stream.pristine, at)) continue;
        const bool is_mask = mask_offset() >= 0 && at >= mask_offset() && at < mask_offset() + 20;
        if (is_mask || (shared >= 0 && at >= shared && at < shared + 20)) continue;
        const bool pointer = word(stream.pristine, at) != 0;
        if (covers(crash, at) || (pointer && pointers == "crash")) std::abort();
        if (covers(hang, at) || (pointer && pointers == "hang")) stream.hung = true;
        if (covers(error, at) || (pointer && pointers == "error")) sticky = kIllegalAddress;
    }
}

// Work on a stream starts: false if it never gets anywhere.
inline bool start(Stream& stream) {
    suffer_damage(stream);
    return !stream.hung && sticky == 0;
}

struct Launch {
    std::string kernel;
    unsigned blocks, threads, cluster;
    void** parameters;

    template <class T>
    T parameter(int i) const {
        return *static_cast<T*>(parameters[i]);
    }
};

inline std::uint64_t scrambled(std::uint64_t x) {
    x = (x + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    return (x ^ (x >> 29)) * 0x94d049bb133111ebu >> 11;
}

inline void run_clusters(Stream& stream, const Sms& sms, const Launch& launch) {
    std::vector<Sms> hosts;
    for (const auto& group : gpcs()) {
        Sms room;
        for (int tpc : group)
            for (int sm : {2 * tpc, 2 * tpc + 1})
                if (std::count(sms.begin(), sms.end(), sm)) room.push_back(sm);
        if (room.size() >= launch.cluster) hosts.push_back(room);
    }
    if (hosts.empty()) {
        stream.hung = true;  // as on an H200
        return;
    }
    auto* out = reinterpret_cast<std::uint32_t*>(launch.parameter<std::uint64_t>(0));
    for (unsigned c = 0; c < launch.blocks / launch.cluster; ++c) {
        const Sms& room = hosts[c % hosts.size()];
        const auto first = scrambled(launches * 65537 + c) % (room.size() - launch.cluster + 1);
        for (unsigned rank = 0; rank < launch.cluster; ++rank) *out++ = static_cast<std::uint32_t>(room[first + rank]);
    }
}

inline int run(Stream& stream, const Launch& launch) {
    namespace k = conflux::kernels;
    ++launches;
    if (!start(stream)) return sticky;
    const Sms sms = enabled_sms(stream);
    const long least = settings.number("HANG_BELOW_TPCS", 0);
    if (sms.empty() || static_cast<long>(sms.size()) < 2 * least || lists(settings.text("HANG_KERNELS"), launch.kernel)) {
        stream.hung = true;
        return kOk;
    }
    const double waves = 1 + (launch.blocks * launch.threads - 1) / (sms.size() * 2048);
    double takes_ns = 0;
    if (launch.kernel == k::kSmid) {
        auto* counters = reinterpret_cast<std::uint32_t*>(launch.parameter<std::uint64_t>(0));
        const auto capacity = launch.parameter<std::uint32_t>(1);
        for (unsigned block = 0; block < launch.blocks; ++block)
            ++counters[std::min<std::uint32_t>(capacity, static_cast<std::uint32_t>(sms[block % sms.size()]))];
    } else if (launch.kernel == k::kCluster) {
        run_clusters(stream, sms, launch);
    } else if (launch.kernel == k::kHold) {
        takes_ns = static_cast<double>(launch.parameter<std::uint64_t>(0));
    } else if (launch.kernel == k::kSpin) {
        takes_ns = 10.0 * launch.parameter<std::uint32_t>(1) * waves;
    } else if (launch.kernel == k::kRead) {
        const double bytes = 16.0 * static_cast<double>(launch.parameter<std::uint64_t>(1)) * launch.parameter<std::uint32_t>(2);
        takes_ns = bytes / std::min(4250.0, 119.0 * static_cast<double>(std::min<std::size_t>(sms.size(), launch.blocks)));
    } else {
        return kInvalidValue;
    }
    stream.busy_until = std::max(stream.busy_until, now_ns()) + static_cast<std::uint64_t>(takes_ns);
    return kOk;
}

}  // namespace stand_in
