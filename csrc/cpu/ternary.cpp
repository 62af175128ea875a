// Noise-shaped folding of signs to three values.
#include "rules/ternary.h"

#include "kernels.h"
#include "parallel.h"

#define HVC_BODY "ternary_body.h"
#include "foreach_isa.h"

namespace hvc {

void ternary_fold(const uint64_t* const* parts, int64_t ranks, int64_t words, uint8_t* out,
                  const uint64_t* const* before, uint64_t* const* after, Launch launch) {
  const int rows = count_rows(ternary_states(ranks));
  const auto range = HVC_CHOOSE(fold);
  parallel_for(launch.threads, words / kGroupWords, words * 8 * (2 + ranks + 2 * rows),
               [&](int64_t first, int64_t last) { range(parts, ranks, out, before, after, first, last); });
}

void ternary_unpack(const uint8_t* packed, int64_t words, uint64_t* bits, uint64_t* zeros, Launch launch) {
  const auto range = HVC_CHOOSE(unpack);
  parallel_for(launch.threads, words / kGroupWords, words * 8 * 4,
               [&](int64_t first, int64_t last) { range(packed, bits, zeros, first, last); });
}

}  // namespace hvc
