// Packed codes of 2 to 8 bits: those of a warp at once, or one.
#pragma once
#include "rules/pack.h"
#include "launch.h"

namespace hvc {
namespace {

__device__ inline uint64_t pack_eight_as(int bits, uint64_t bytes) {
  switch (bits) {
    case 2:
      return pack_eight<2>(bytes);
    case 3:
      return pack_eight<3>(bytes);
    case 4:
      return pack_eight<4>(bytes);
    case 5:
      return pack_eight<5>(bytes);
    case 6:
      return pack_eight<6>(bytes);
    case 7:
      return pack_eight<7>(bytes);
    default:
      return bytes;
  }
}

__device__ inline uint64_t unpack_eight_as(int bits, uint64_t packed) {
  switch (bits) {
    case 2:
      return unpack_eight<2>(packed);
    case 3:
      return unpack_eight<3>(packed);
    case 4:
      return unpack_eight<4>(packed);
    case 5:
      return unpack_eight<5>(packed);
    case 6:
      return unpack_eight<6>(packed);
    case 7:
      return unpack_eight<7>(packed);
    default:
      return packed;
  }
}

// Adds numbers that lie side by side; `tops` are their top bits, which are added apart, so that no carry crosses.
__device__ inline uint64_t add_beside(uint64_t a, uint64_t b, uint64_t tops) {
  return ((a & ~tops) + (b & ~tops)) ^ ((a ^ b) & tops);
}

// The bytes of codes that there are, of eight from one on that is `left` before the end.
__device__ inline uint64_t bytes_before_end(uint64_t bytes, int64_t left) {
  return left >= kPacked ? bytes : left <= 0 ? 0 : bytes & ~(~uint64_t(0) << (8 * left));
}

// Packs the codes of kWarp groups of eight, a byte each in the block's shared memory, and writes the first `used` bytes
// of what they become: all lanes together, words where those are aligned.
__device__ inline void put_packed(uint64_t* codes, int bits, uint8_t* into, int used) {
  auto* bytes = reinterpret_cast<uint8_t*>(codes);
  __syncwarp();
  if (bits != 8) {
    const uint64_t packed = pack_eight_as(bits, codes[lane_index()]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPacked; ++i)
      if (i < bits) bytes[lane_index() * bits + i] = uint8_t(packed >> (8 * i));
    __syncwarp();
  }
  const int words = reinterpret_cast<uintptr_t>(into) % 4 == 0 ? used / 4 : 0;
  for (int i = lane_index(); i < words; i += kWarp)
    reinterpret_cast<uint32_t*>(into)[i] = reinterpret_cast<const uint32_t*>(codes)[i];
  for (int i = 4 * words + lane_index(); i < used; i += kWarp) into[i] = bytes[i];
  __syncwarp();
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
