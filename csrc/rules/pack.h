// Codes of 2 to 8 bits in two's complement, side by side: element i at the bits from bits * i on, the lowest first.
// Bits after the last code of its byte are 0.
#pragma once
#include "rules/common.h"

namespace hvc {

constexpr int kPacked = 8;  // codes that are packed at once: they are whole bytes

HVC_RULE int64_t packed_bytes(int64_t count, int bits) { return (count * bits + 7) / 8; }

HVC_RULE constexpr uint64_t every(int width, int low) {
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += width) mask |= ((uint64_t(1) << low) - 1) << at;
  return mask;
}

// Eight codes, a byte each, to 8 * kBits bits and back: neighbours are joined, then pairs, then fours.
template <int kBits> HVC_RULE uint64_t pack_eight(uint64_t bytes) {
  if (kBits == 8) return bytes;
  constexpr int b = kBits % 8;
  const uint64_t two = (bytes & every(16, b)) | (bytes >> (8 - b) & every(16, b) << b);
  const uint64_t four = (two & every(32, 2 * b)) | (two >> (16 - 2 * b) & every(32, 2 * b) << (2 * b));
  return (four & every(64, 4 * b)) | (four >> (32 - 4 * b) & every(64, 4 * b) << (4 * b));
}

// The codes are not negative yet: see signed_code.
template <int kBits> HVC_RULE uint64_t unpack_eight(uint64_t packed) {
  if (kBits == 8) return packed;
  constexpr int b = kBits % 8;
  const uint64_t four = (packed & every(64, 4 * b)) | (packed & every(64, 4 * b) << (4 * b)) << (32 - 4 * b);
  const uint64_t two = (four & every(32, 2 * b)) | (four & every(32, 2 * b) << (2 * b)) << (16 - 2 * b);
  return (two & every(16, b)) | (two & every(16, b) << b) << (8 - b);
}

HVC_RULE int32_t signed_code(uint32_t code, int bits) {
  const int32_t half = 1 << (bits - 1);
  return (int32_t(code) ^ half) - half;
}

}  // namespace hvc
