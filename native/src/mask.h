// Sets of TPCs, and the place in a stream's structure where the driver keeps one.
//
// That a stream carries such a mask, and how it is laid out, was found by Bakita and Anderson ("Hardware Compute
// Partitioning on NVIDIA GPUs", RTAS 2023; its successor at ECRTS 2025). It is no documented interface: an offset must
// be verified on the driver in use before anything relies on it.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace conflux {

constexpr int kMaskWords = 4;
constexpr int kMaskTpcs = 32 * kMaskWords;

class Mask {
public:
    using Words = std::array<std::uint32_t, kMaskWords>;

    explicit Mask(const std::vector<std::int64_t>& tpcs) {
        words_.fill(0xffffffffu);
        for (std::int64_t tpc : tpcs) {
            if (tpc < 0 || tpc >= kMaskTpcs)
                throw std::invalid_argument("TPC " + std::to_string(tpc) + " is outside 0..127");
            words_[tpc / 32] &= ~(1u << (tpc % 32));
        }
        if (size() == 0) throw std::invalid_argument("a mask must enable at least one TPC: nothing could run");
    }
    // From words that enable at least one TPC.
    explicit Mask(const Words& words) : words_(words) {}

    // As the driver reads them: a set bit disables a TPC.
    const Words& words() const { return words_; }

    bool enables(int tpc) const { return !(words_[tpc / 32] >> (tpc % 32) & 1u); }

    int size() const {
        int count = 0;
        for (std::uint32_t word : words_) count += __builtin_popcount(~word);
        return count;
    }

    std::vector<int> tpcs() const {
        std::vector<int> enabled;
        for (int tpc = 0; tpc < kMaskTpcs; ++tpc)
            if (enables(tpc)) enabled.push_back(tpc);
        return enabled;
    }

    bool operator==(const Mask& other) const { return words_ == other.words_; }

private:
    Words words_;
};

// {u32 enabled; u32 mask[4]} at *(char**)stream + offset.
class MaskSlot {
public:
    static constexpr std::size_t kBytes = 4 + 4 * kMaskWords;
    using Raw = std::array<unsigned char, kBytes>;

    explicit MaskSlot(std::int64_t offset) : offset_(static_cast<std::size_t>(offset)) {
        if (offset <= 0 || offset >= 4096 || offset % 4 != 0)
            throw std::invalid_argument("offset " + std::to_string(offset) + " is not a multiple of 4 in 4..4092");
    }

    std::size_t offset() const { return offset_; }

    // The driver reads the words when a kernel is launched, on the launching thread. So no other thread may launch on
    // this stream meanwhile: it could see half of the old set and half of the new one. The word that switches the mask
    // on comes last here, and first in clear(), so that a fresh stream never shows a half-written set.
    void apply(std::uintptr_t stream, const Mask& mask) const {
        volatile std::uint32_t* place = at(stream);
        for (int i = 0; i < kMaskWords; ++i) place[1 + i] = mask.words()[i];
        place[0] = 1;
    }

    void clear(std::uintptr_t stream) const {
        volatile std::uint32_t* place = at(stream);
        for (int i = 0; i <= kMaskWords; ++i) place[i] = 0;
    }

    std::optional<Mask> read(std::uintptr_t stream) const {
        const volatile std::uint32_t* place = at(stream);
        if (place[0] == 0) return std::nullopt;
        Mask::Words words;
        for (int i = 0; i < kMaskWords; ++i) words[i] = place[1 + i];
        Mask mask(words);
        if (mask.size() == 0) throw std::invalid_argument("what stands there disables every TPC: no mask of conflux's");
        return mask;
    }

    Raw raw(std::uintptr_t stream) const {
        Raw bytes;
        std::memcpy(bytes.data(), const_cast<const std::uint32_t*>(at(stream)), kBytes);
        return bytes;
    }

    void restore(std::uintptr_t stream, const Raw& bytes) const {
        std::uint32_t words[1 + kMaskWords];
        std::memcpy(words, bytes.data(), kBytes);
        volatile std::uint32_t* place = at(stream);
        for (int i = kMaskWords; i >= 0; --i) place[i] = words[i];
    }

private:
    volatile std::uint32_t* at(std::uintptr_t stream) const {
        if (stream < 4096 || stream % 8 != 0)
            throw std::invalid_argument("stream " + std::to_string(stream) +
                                        " is a default stream or no stream: a mask needs one of your own");
        char* structure;
        std::memcpy(&structure, reinterpret_cast<const void*>(stream), sizeof structure);
        if (structure == nullptr) throw std::invalid_argument("the stream's handle points to nothing");
        return reinterpret_cast<volatile std::uint32_t*>(structure + offset_);
    }

    std::size_t offset_;
};

}  // namespace conflux
