// The rows of counts of rules/shaped.h: few addresses, which travel with the kernel's arguments.
#pragma once
#include <algorithm>

#include "rules/shaped.h"
#include "launch.h"

namespace hvc {
namespace {

struct CountRows {
  const uint64_t* before[kMaxRows];
  uint64_t* after[kMaxRows];
  int rows;
};

inline CountRows rows_of(int64_t modulus, const uint64_t* const* before, uint64_t* const* after) {
  CountRows found{};
  found.rows = count_rows(modulus);
  std::copy(before, before + found.rows, found.before);
  std::copy(after, after + found.rows, found.after);
  return found;
}

// The counts of a thread: those of the lanes of a word, or of a byte of one.
template <class Bits, class Count> __device__ void load_counts(const CountRows& memory, int64_t at, Count* counts) {
#pragma unroll
  for (int l = 0; l < kMaxRows; ++l) {
    if (l >= memory.rows) break;
    counts[l] = reinterpret_cast<const Bits*>(memory.before[l])[at];
  }
}
template <class Bits, class Count>
__device__ void store_counts(const CountRows& memory, int64_t at, const Count* counts) {
#pragma unroll
  for (int l = 0; l < kMaxRows; ++l) {
    if (l >= memory.rows) break;
    reinterpret_cast<Bits*>(memory.after[l])[at] = Bits(counts[l]);
  }
}

}  // namespace
}  // namespace hvc
