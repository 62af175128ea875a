// Random bits of a rational probability, and the unbiased merge of two bit vectors.
#include "rules/bernoulli.h"
#include "kernels.h"
#include "parallel.h"

#define HVC_BODY "merge_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

// What drawing a word costs, in the bytes that could be moved meanwhile.
constexpr int64_t kWorkPerWord = 256;

}  // namespace

void merge_bits(uint64_t* into, const uint64_t* other, int64_t words, uint64_t numerator, uint64_t denominator,
                const Stream* key, int64_t word_offset, Launch launch) {
  if (numerator == denominator) {
    memcpy(into, other, size_t(words) * sizeof *into);
    return;
  }
  const Digits p = binary_digits(numerator, denominator);
  const auto range = HVC_CHOOSE(merge);
  parallel_for(launch.threads, words, words * kWorkPerWord,
               [&](int64_t first, int64_t last) { range(into, other, p, *key, word_offset, first, last); });
}

void bernoulli_words(uint64_t* out, int64_t words, uint64_t numerator, uint64_t denominator, const Stream* key,
                     int64_t word_offset, Launch launch) {
  if (numerator == denominator) {
    memset(out, 0xff, size_t(words) * sizeof *out);
    return;
  }
  const Digits p = binary_digits(numerator, denominator);
  const auto range = HVC_CHOOSE(bernoulli);
  parallel_for(launch.threads, words, words * kWorkPerWord,
               [&](int64_t first, int64_t last) { range(out, p, *key, word_offset, first, last); });
}

}  // namespace hvc
