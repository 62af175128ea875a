// The majority of many bit vectors, counted without unpacking a bit.
#include "rules/majority.h"
#include "parts.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

// A thread counts 64 lanes. Planes above `levels` stay 0; the loops are unrolled to keep them in registers.
__global__ void fold_kernel(PartList<uint64_t> parts, int64_t part_count, int levels, int64_t count, uint64_t* out) {
  for (int64_t word = first_item(); word < words_for(count); word += item_stride()) {
    uint64_t planes[kMaxPlanes] = {};
    for (int64_t part = 0; part < part_count; ++part) {
      uint64_t carry = parts[part][word];
#pragma unroll
      for (int level = 0; level < kMaxPlanes; ++level) {
        if (level >= levels) break;
        const uint64_t sum = planes[level] ^ carry;
        carry &= planes[level];
        planes[level] = sum;
      }
    }
    uint64_t majority = ~uint64_t(0);
#pragma unroll
    for (int level = 0; level < kMaxPlanes; ++level)
      at_least(majority_threshold(part_count) >> level & 1, planes[level], majority);
    out[word] = majority & valid_bits(word, count);
  }
}

int bit_length(int64_t value) {
  int bits = 0;
  while (value >> bits != 0) ++bits;
  return bits;
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void majority_fold(const uint64_t* const* parts, int64_t part_count, int64_t count, uint64_t* out, Launch launch) {
  if (count == 0) return;
  const Parts<uint64_t> addresses(parts, part_count, launch);
  start(fold_kernel, words_for(count), launch, addresses.list(), part_count, bit_length(part_count), count, out);
}

}  // namespace hvc
