// Noise-shaped merging of signs.
#include "rules/shaped.h"
#include "parts.h"

namespace hvc {
namespace {

// The rows of counts: few addresses, which travel with the kernel's arguments.
struct CountRows {
  const uint64_t* before[kMaxRows];
  uint64_t* after[kMaxRows];
  int rows;
};

CountRows rows_of(int64_t ranks, const uint64_t* const* before, uint64_t* const* after) {
  CountRows found{};
  found.rows = count_rows(ranks);
  std::copy(before, before + found.rows, found.before);
  std::copy(after, after + found.rows, found.after);
  return found;
}

// ---- kernels ----------------------------------------------------------------------------------------------

// A thread counts 64 lanes.
__device__ void load_counts(const CountRows& memory, int64_t word, uint64_t* counts) {
  for (int l = 0; l < memory.rows; ++l) counts[l] = memory.before[l][word];
}
__device__ void store_counts(const CountRows& memory, int64_t word, const uint64_t* counts) {
  for (int l = 0; l < memory.rows; ++l) memory.after[l][word] = counts[l];
}

__global__ void shaped_merge_kernel(uint64_t* into, const uint64_t* other, int64_t words, int64_t ranks,
                                    CountRows memory) {
  for (int64_t word = first_item(); word < words; word += item_stride()) {
    uint64_t counts[kMaxRows];
    load_counts(memory, word, counts);
    into[word] = shaped_merge(into[word], other[word], counts, counts, memory.rows, ranks);
    store_counts(memory, word, counts);
  }
}

__global__ void shaped_fold_kernel(PartList<uint64_t> parts, int64_t ranks, int64_t words, uint64_t* out,
                                   CountRows memory) {
  for (int64_t word = first_item(); word < words; word += item_stride()) {
    uint64_t counts[kMaxRows], merged = 0;
    load_counts(memory, word, counts);
    for (int64_t part = 0; part < ranks; ++part)
      merged |= count_once(counts, counts, memory.rows, ranks, parts[part][word], uint64_t(0));
    out[word] = merged;
    store_counts(memory, word, counts);
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void shaped_merge(uint64_t* into, const uint64_t* other, int64_t words, int64_t ranks, const uint64_t* const* before,
                  uint64_t* const* after, Launch launch) {
  if (words == 0) return;
  start(shaped_merge_kernel, words, launch, into, other, words, ranks, rows_of(ranks, before, after));
}

void shaped_fold(const uint64_t* const* parts, int64_t ranks, int64_t words, uint64_t* out,
                 const uint64_t* const* before, uint64_t* const* after, Launch launch) {
  if (words == 0) return;
  const Parts<uint64_t> addresses(parts, ranks, launch);
  start(shaped_fold_kernel, words, launch, addresses.list(), ranks, words, out, rows_of(ranks, before, after));
}

}  // namespace hvc
