// Packed codes of 2 to 8 bits: those of a warp at once, or one.
#pragma once
#include "rules/pack.h"
#include "launch.h"

namespace hvc {
namespace {

// The rule of rules/pack.h for a number of bits that is known at run time only, in halves of 32 bits, the integers of a
// GPU's registers. What it needs is found once.
struct Packing {
  int bits;
  uint32_t codes, pairs;  // those of neighbours that stay where they are
  uint32_t inverse;       // of `bits`, times 2^16, for numbers below 2^8

  __device__ explicit Packing(int width)
      : bits(width),
        codes(((1u << width) - 1u) * 0x00010001u),
        pairs((1u << 2 * width) - 1u),
        inverse(0xffffu / uint32_t(width) + 1u) {}

  __device__ uint64_t pack(uint64_t bytes) const {
    return pack_four(uint32_t(bytes)) | uint64_t(pack_four(uint32_t(bytes >> 32))) << (4 * bits);
  }
  // The codes are not negative yet: see signed_code.
  __device__ uint64_t unpack(uint64_t packed) const {
    return unpack_four(uint32_t(packed)) | uint64_t(unpack_four(uint32_t(packed >> (4 * bits)))) << 32;
  }
  // They are: above its highest bit a code has more like it.
  __device__ uint64_t unpack_signed(uint64_t packed) const {
    if (bits == 8) return packed;
    return signed_four(unpack_four(uint32_t(packed))) |
           uint64_t(signed_four(unpack_four(uint32_t(packed >> (4 * bits))))) << 32;
  }

 private:
  __device__ uint32_t signed_four(uint32_t bytes) const {
    const uint32_t tops = bytes & (0x01010101u << (bits - 1));
    return bytes | tops * ((2u << (8 - bits)) - 2u);
  }
  __device__ uint32_t pack_four(uint32_t bytes) const {
    const uint32_t two = (bytes & codes) | (bytes >> (8 - bits) & codes << bits);
    return (two & pairs) | (two >> (16 - 2 * bits) & pairs << 2 * bits);
  }
  __device__ uint32_t unpack_four(uint32_t packed) const {
    const uint32_t two = (packed & pairs) | (packed & pairs << 2 * bits) << (16 - 2 * bits);
    return (two & codes) | (two & codes << bits) << (8 - bits);
  }
};

// Adds numbers that lie side by side; `tops` are their top bits, which are added apart, so that no carry crosses.
__device__ inline uint64_t add_beside(uint64_t a, uint64_t b, uint64_t tops) {
  return ((a & ~tops) + (b & ~tops)) ^ ((a ^ b) & tops);
}

// The bytes of codes that there are, of eight from one on that is `left` before the end.
__device__ inline uint64_t bytes_before_end(uint64_t bytes, int64_t left) {
  return left >= kPacked ? bytes : left <= 0 ? 0 : bytes & ~(~uint64_t(0) << (8 * left));
}

// Four bytes of what kWarp groups of eight codes are packed into, from byte i on: of a group and the next one.
__device__ inline uint32_t word_of_groups(const uint64_t* groups, const Packing& packing, int i) {
  if (packing.bits == 8) return uint32_t(groups[i / 8] >> (8 * (i % 8)));
  const int group = int(uint32_t(i) * packing.inverse >> 16), behind = i - group * packing.bits;
  return uint32_t(groups[group] >> (8 * behind)) |
         uint32_t(groups[min(group + 1, kWarp - 1)] << (8 * (packing.bits - behind)));
}

// Packs the codes of kWarp groups of eight, a byte each in the block's shared memory, and writes the first `used` bytes
// of what they become: all lanes together, words where those are aligned. Groups of four or eight bits are whole words.
__device__ inline void put_packed(uint64_t* codes, const Packing& packing, uint8_t* into, int used) {
  __syncwarp();
  const bool aligned = reinterpret_cast<uintptr_t>(into) % 4 == 0;
  auto* to = reinterpret_cast<uint32_t*>(into);
  if (packing.bits % 4 == 0 && aligned && used % 4 == 0) {
    const auto* from = reinterpret_cast<const uint32_t*>(codes);
    const int i = lane_index(), words = used / 4;
    if (packing.bits == 4) {
      if (i < words) to[i] = uint32_t(Packing(4).pack(codes[i]));
    } else {
      if (i < words) to[i] = from[i];
      if (i + kWarp < words) to[i + kWarp] = from[i + kWarp];
    }
    __syncwarp();
    return;
  }
  if (packing.bits != 8) {
    codes[lane_index()] = packing.pack(codes[lane_index()]);
    __syncwarp();
  }
  const int words = aligned ? used / 4 : 0;
#pragma unroll 1  // at most two, and registers are scarce
  for (int i = lane_index(); i < words; i += kWarp) to[i] = word_of_groups(codes, packing, 4 * i);
#pragma unroll 1
  for (int i = 4 * words + lane_index(); i < used; i += kWarp) into[i] = uint8_t(word_of_groups(codes, packing, i));
  __syncwarp();
}

// The same for codes that are 32 apart in a lane. A lane has made all of them before it writes one: the compiler would
// not read the next random number from shared memory before that.
template <int kCodes>
__device__ void put_packed(const uint32_t (&mine)[kCodes], const Packing& packing, uint8_t* into, int used) {
  __shared__ uint64_t of_block[kThreads];
  uint64_t* codes = of_block + int(threadIdx.x) / kWarp * kWarp;
#pragma unroll
  for (int k = 0; k < kCodes; ++k) reinterpret_cast<uint8_t*>(codes)[k * kWarp + lane_index()] = uint8_t(mine[k]);
  put_packed(codes, packing, into, used);
}

// Whether all parts begin at a multiple of four bytes.
inline bool are_words(const uint8_t* const* parts, int64_t part_count) {
  return std::all_of(parts, parts + part_count,
                     [](const uint8_t* part) { return reinterpret_cast<uintptr_t>(part) % 4 == 0; });
}

// The packed codes of group i of `count` groups of eight, a multiple of eight, that begin at a multiple of four bytes.
__device__ inline uint64_t load_group(const uint8_t* groups, int bits, int i, int count) {
  const auto* words = reinterpret_cast<const uint32_t*>(groups);
  if (bits == 4) return words[i];
  const int byte = i * bits, first = byte / 4, last = count * bits / 4 - 1, shift = byte % 4 * 8;
  if (bits == 8) return uint64_t(words[first + 1]) << 32 | words[first];
  const uint64_t middle = words[min(first + 1, last)];
  const uint32_t low = uint32_t((middle << 32 | words[first]) >> shift);
  const uint32_t high = uint32_t((uint64_t(words[min(first + 2, last)]) << 32 | middle) >> shift);
  return uint64_t(high) << 32 | low;
}

// The same where they begin anywhere: the `used` bytes of it that there are.
__device__ inline uint64_t load_bytes_of_group(const uint8_t* group, int used) {
  uint64_t packed = 0;
#pragma unroll
  for (int i = 0; i < kPacked; ++i)
    if (i < used) packed |= uint64_t(group[i]) << (8 * i);
  return packed;
}

__device__ inline int32_t packed_code(const uint8_t* codes, int64_t i, int bits) {
  const uint8_t* group = codes + uint64_t(i) / kPacked * uint64_t(bits);
  const uint32_t bit = uint32_t(i) % kPacked * uint32_t(bits), shift = bit % 8;
  uint32_t word = group[bit / 8];
  if (shift + uint32_t(bits) > 8) word |= uint32_t(group[bit / 8 + 1]) << 8;
  return signed_code(word >> shift & ((1u << bits) - 1u), bits);
}

}  // namespace
}  // namespace hvc
