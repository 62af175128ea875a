// Packed codes of 2 to 8 bits: eight at once, or one.
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

// Writes up to eight codes, a byte each, from element `first` on, a multiple of 8: the bytes that `count` codes need.
__device__ inline void put_eight(uint8_t* codes, int64_t first, int64_t count, int bits, uint64_t bytes) {
  const uint64_t packed = pack_eight_as(bits, bytes);
  uint8_t* into = codes + first / kPacked * bits;
  const int64_t used = packed_bytes(min(count - first, int64_t(kPacked)), bits);
  for (int i = 0; i < used; ++i) into[i] = uint8_t(packed >> (8 * i));
}

__device__ inline int32_t packed_code(const uint8_t* codes, int64_t i, int bits) {
  const int64_t bit = i * bits;
  const int shift = int(bit % 8);
  uint32_t word = codes[bit / 8];
  if (shift + bits > 8) word |= uint32_t(codes[bit / 8 + 1]) << 8;
  return signed_code(word >> shift & ((1u << bits) - 1u), bits);
}

}  // namespace
}  // namespace hvc
