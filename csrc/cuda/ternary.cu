// Noise-shaped folding of signs to three values.
#include "rules/ternary.h"

#include "count_rows.h"
#include "parts.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

// A thread takes eight lanes of a group: a byte of each of its words, and eight bytes of the result.
constexpr int kLanesOfThread = 8, kThreadsOfGroup = int(kGroupBytes) / kLanesOfThread;

__device__ uint64_t spread(uint8_t bits) {
  const uint64_t eight = uint64_t(bits) * 0x0101010101010101 & 0x8040201008040201;
  return (eight + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101;
}

__global__ void fold_kernel(PartList<uint8_t> parts, int64_t ranks, int64_t items, uint64_t* out, CountRows memory) {
  for (int64_t item = first_item(); item < items; item += item_stride()) {
    const int64_t group = item / kThreadsOfGroup;
    uint64_t packed = 0;
#pragma unroll 1  // the counts of one word take enough registers
    for (int k = 0; k < kGroupWords; ++k) {
      const int64_t byte = (group * kGroupWords + k) * kThreadsOfGroup + item % kThreadsOfGroup;
      uint32_t counts[kMaxRows];  // of eight lanes; an integer of a GPU's registers
      Trits<uint32_t> digits;
      load_counts<uint8_t>(memory, byte, counts);
      for (int64_t part = 0; part < ranks; ++part)
        ternary_add(uint32_t(parts[part][byte]), counts, memory.rows, ranks, digits);
      store_counts<uint8_t>(memory, byte, counts);
      packed += (spread(uint8_t(digits.least_one)) + spread(uint8_t(digits.two))) * digit_weight(k);
    }
    out[item] = packed;
  }
}

__global__ void unpack_kernel(const uint8_t* packed, int64_t items, uint8_t* bits, uint8_t* zeros) {
  for (int64_t item = first_item(); item < items; item += item_stride()) {
    const int64_t group = item / kThreadsOfGroup;
    uint64_t bytes = reinterpret_cast<const uint64_t*>(packed)[item];
    for (int k = int(kGroupWords) - 1; k >= 0; --k) {
      const int weight = digit_weight(k);
      uint8_t least_one = 0, two = 0;
      for (int lane = 0; lane < kLanesOfThread; ++lane) {
        const int value = int(bytes >> (8 * lane) & 0xff);
        const int digit = value >= 2 * weight ? 2 : value >= weight ? 1 : 0;
        least_one |= uint8_t((digit > 0) << lane);
        two |= uint8_t((digit > 1) << lane);
        bytes -= uint64_t(digit * weight) << (8 * lane);
      }
      const int64_t byte = (group * kGroupWords + k) * kThreadsOfGroup + item % kThreadsOfGroup;
      bits[byte] = least_one;
      zeros[byte] = uint8_t(least_one & ~two);
    }
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void ternary_fold(const uint64_t* const* parts, int64_t ranks, int64_t words, uint8_t* out,
                  const uint64_t* const* before, uint64_t* const* after, Launch launch) {
  if (words == 0) return;
  const auto bytes = reinterpret_cast<const uint8_t* const*>(parts);
  const Parts<uint8_t> addresses(bytes, ranks, launch);
  const int64_t items = words / kGroupWords * kThreadsOfGroup;
  start(fold_kernel, items, launch, addresses.list(), ranks, items, reinterpret_cast<uint64_t*>(out),
        rows_of(ternary_states(ranks), before, after));
}

void ternary_unpack(const uint8_t* packed, int64_t words, uint64_t* bits, uint64_t* zeros, Launch launch) {
  if (words == 0) return;
  const int64_t items = words / kGroupWords * kThreadsOfGroup;
  start(unpack_kernel, items, launch, packed, items, reinterpret_cast<uint8_t*>(bits),
        reinterpret_cast<uint8_t*>(zeros));
}

}  // namespace hvc
