// Noise-shaped folding of signs to three values.
#include "rules/ternary.h"

#include "count_rows.h"
#include "parts.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

// A thread folds 32 lanes of a group, half of each of its words, an integer of a GPU's registers; and unpacks eight.
constexpr int kFolded = 32, kUnpacked = 8;

// Where a thread's lanes of word k of its group are, in integers of that many bits.
template <int kLanes> __device__ int64_t place_of(int64_t item, int64_t k) {
  constexpr uint64_t kThreads = kGroupBytes / kLanes;
  return int64_t((uint64_t(item) / kThreads * kGroupWords + uint64_t(k)) * kThreads + uint64_t(item) % kThreads);
}

// Four bits as the lowest ones of four bytes: a product whose terms do not meet.
__device__ uint32_t spread(uint32_t bits) { return (bits & 15u) * 0x00204081u & 0x01010101u; }

__global__ void fold_kernel(PartList<uint32_t> parts, int64_t ranks, int64_t items, uint64_t* out, CountRows memory) {
  constexpr int kFours = kFolded / 4;
  for (int64_t item = first_item(); item < items; item += item_stride()) {
    uint32_t packed[kFours] = {};
#pragma unroll 1  // the counts of one word take enough registers
    for (int k = 0; k < kGroupWords; ++k) {
      const int64_t place = place_of<kFolded>(item, k);
      uint32_t counts[kMaxRows];
      Trits<uint32_t> digits;
      load_counts<uint32_t>(memory, place, counts);
      for (int64_t part = 0; part < ranks; ++part) ternary_add(parts[part][place], counts, memory.rows, ranks, digits);
      store_counts<uint32_t>(memory, place, counts);
      const uint32_t weight = digit_weight(k);
#pragma unroll
      for (int j = 0; j < kFours; ++j)
        packed[j] += (spread(digits.least_one >> (4 * j)) + spread(digits.two >> (4 * j))) * weight;
    }
#pragma unroll
    for (int j = 0; j < kFours; j += 2) out[item * (kFours / 2) + j / 2] = uint64_t(packed[j + 1]) << 32 | packed[j];
  }
}

// Eight bytes in the halves of four integers: of lanes i and i + 4. What no five digits are counts as the largest.
struct Bytes {
  uint32_t pairs[4];
};
__device__ Bytes bytes_of(uint64_t packed) {
  constexpr uint32_t kBoth = 0x00010001u, kMost = 242;
  Bytes bytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = packed >> (8 * i) & 0xffu, high = packed >> (8 * i + 32) & 0xffu, pair = low | high << 16;
    const uint32_t above = (pair + (0x7fffu - kMost) * kBoth) & 0x8000u * kBoth, mask = above - (above >> 15);
    bytes.pairs[i] = (pair & ~mask) | (kMost * kBoth & mask);
  }
  return bytes;
}

// Takes the lowest digit out of each of eight bytes.
__device__ Trits<uint32_t> next_digit(Bytes& bytes) {
  constexpr uint32_t kBoth = 0x00010001u;
  uint32_t one = 0, two = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t third = bytes.pairs[i] * 171u >> 9 & 0x7fu * kBoth, digit = bytes.pairs[i] - 3 * third;
    bytes.pairs[i] = third;
    one |= (digit & kBoth) << i;
    two |= (digit >> 1 & kBoth) << i;
  }
  const uint32_t not_zero = one | two;
  return {(not_zero | not_zero >> 12) & 0xffu, (two | two >> 12) & 0xffu};
}

__global__ void unpack_kernel(const uint64_t* packed, int64_t items, uint8_t* bits, uint8_t* zeros) {
  for (int64_t item = first_item(); item < items; item += item_stride()) {
    Bytes bytes = bytes_of(packed[item]);
#pragma unroll
    for (int k = 0; k < kGroupWords; ++k) {
      const Trits<uint32_t> digits = next_digit(bytes);
      const int64_t place = place_of<kUnpacked>(item, k);
      bits[place] = uint8_t(digits.least_one);
      zeros[place] = uint8_t(digits.least_one & ~digits.two);
    }
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void ternary_fold(const uint64_t* const* parts, int64_t ranks, int64_t words, uint8_t* out,
                  const uint64_t* const* before, uint64_t* const* after, Launch launch) {
  if (words == 0) return;
  const Parts<uint32_t> halves(reinterpret_cast<const uint32_t* const*>(parts), ranks, launch);
  const int64_t items = words / kGroupWords * (kGroupBytes / kFolded);
  start(fold_kernel, items, launch, halves.list(), ranks, items, reinterpret_cast<uint64_t*>(out),
        rows_of(ternary_states(ranks), before, after));
}

void ternary_unpack(const uint8_t* packed, int64_t words, uint64_t* bits, uint64_t* zeros, Launch launch) {
  if (words == 0) return;
  const int64_t items = words / kGroupWords * (kGroupBytes / kUnpacked);
  start(unpack_kernel, items, launch, reinterpret_cast<const uint64_t*>(packed), items,
        reinterpret_cast<uint8_t*>(bits), reinterpret_cast<uint8_t*>(zeros));
}

}  // namespace hvc
