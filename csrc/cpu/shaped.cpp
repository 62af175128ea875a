// Noise-shaped merging of signs.
#include "rules/shaped.h"

#include "kernels.h"
#include "parallel.h"

#define HVC_BODY "shaped_body.h"
#include "foreach_isa.h"

namespace hvc {

void shaped_merge(uint64_t* into, const uint64_t* other, int64_t words, int64_t ranks, const uint64_t* const* before,
                  uint64_t* const* after, Launch launch) {
  const int rows = count_rows(ranks);
  const auto range = HVC_CHOOSE(merge);
  parallel_for(launch.threads, words, words * 8 * (3 + 2 * rows),
               [&](int64_t first, int64_t last) { range(into, other, ranks, before, after, first, last); });
}

void shaped_fold(const uint64_t* const* parts, int64_t ranks, int64_t words, uint64_t* out,
                 const uint64_t* const* before, uint64_t* const* after, Launch launch) {
  const int rows = count_rows(ranks);
  const auto range = HVC_CHOOSE(fold);
  parallel_for(launch.threads, words, words * 8 * (1 + ranks + 2 * rows),
               [&](int64_t first, int64_t last) { range(parts, ranks, out, before, after, first, last); });
}

}  // namespace hvc
