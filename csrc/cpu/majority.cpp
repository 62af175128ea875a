// The majority of many bit vectors, counted without unpacking a bit.
#include "rules/majority.h"

#include "kernels.h"
#include "parallel.h"

#define HVC_BODY "majority_body.h"
#include "foreach_isa.h"

namespace hvc {

void majority_fold(const uint64_t* const* parts, int64_t part_count, int64_t count, uint64_t* out, Launch launch) {
  const int64_t words = words_for(count);
  const auto range = HVC_CHOOSE(fold);
  parallel_for(launch.threads, words, words * 8 * part_count,
               [&](int64_t first, int64_t last) { range(parts, part_count, count, out, first, last); });
}

}  // namespace hvc
