// Noise-shaped merging of signs.
#include "rules/shaped.h"

#include "count_rows.h"
#include "parts.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

// A thread counts 64 lanes.
__global__ void shaped_merge_kernel(uint64_t* into, const uint64_t* other, int64_t words, int64_t ranks,
                                    CountRows memory) {
  for (int64_t word = first_item(); word < words; word += item_stride()) {
    uint64_t counts[kMaxRows];
    load_counts<uint64_t>(memory, word, counts);
    into[word] = shaped_merge(into[word], other[word], counts, counts, memory.rows, ranks);
    store_counts<uint64_t>(memory, word, counts);
  }
}

__global__ void shaped_fold_kernel(PartList<uint64_t> parts, int64_t ranks, int64_t words, uint64_t* out,
                                   CountRows memory) {
  for (int64_t word = first_item(); word < words; word += item_stride()) {
    uint64_t counts[kMaxRows], merged = 0;
    load_counts<uint64_t>(memory, word, counts);
    for (int64_t part = 0; part < ranks; ++part)
      merged |= count_once(counts, counts, memory.rows, ranks, parts[part][word], uint64_t(0));
    out[word] = merged;
    store_counts<uint64_t>(memory, word, counts);
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
