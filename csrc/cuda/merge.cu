// Random bits of a rational probability, and the unbiased merge of two bit vectors.
#include "rules/bernoulli.h"
#include "launch.h"

namespace hvc {
namespace {

// ---- helpers ----------------------------------------------------------------------------------------------

// A counter's 128 bits are two words: a thread draws both.
struct Pair {
  uint64_t even, odd;
};

__device__ Pair bernoulli_pair(const Digits& p, const Stream& s, int64_t group) {
  Pair undecided{~uint64_t(0), ~uint64_t(0)}, out{0, 0};
  for (int digit = 0; digit < p.count && (undecided.even | undecided.odd) != 0; ++digit) {
    const Counter r = philox4x32({uint32_t(group), s.c1 | uint32_t(digit), s.c2, s.c3}, s.k0, s.k1);
    const bool one = p.ones >> digit & 1;
    decide(one, uint64_t(r.c1) << 32 | r.c0, undecided.even, out.even);
    decide(one, uint64_t(r.c3) << 32 | r.c2, undecided.odd, out.odd);
  }
  return out;
}

// The vector that is drawn: absent `other` means the random bits themselves.
struct Draw {
  uint64_t* into;
  const uint64_t* other;
  int64_t words, word_offset;
  Digits p;
  Stream stream;
};

__device__ void use(const Draw& d, int64_t word, uint64_t random) {
  if (word < 0 || word >= d.words) return;
  const uint64_t mine = d.into[word];
  d.into[word] = d.other ? mine ^ ((mine ^ d.other[word]) & random) : random;
}

// ---- kernels ----------------------------------------------------------------------------------------------

__global__ void draw_kernel(Draw d) {
  const int64_t first = d.word_offset / 2, last = (d.word_offset + d.words + 1) / 2;
  for (int64_t group = first + first_item(); group < last; group += item_stride()) {
    const Pair random = bernoulli_pair(d.p, d.stream, group);
    use(d, 2 * group - d.word_offset, random.even);
    use(d, 2 * group - d.word_offset + 1, random.odd);
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

void draw(const Draw& d, Launch launch) {
  start(draw_kernel, (d.word_offset + d.words + 1) / 2 - d.word_offset / 2, launch, d);
}

}  // namespace

void merge_bits(uint64_t* into, const uint64_t* other, int64_t words, uint64_t numerator, uint64_t denominator,
                const Stream* key, int64_t word_offset, Launch launch) {
  if (words == 0) return;
  if (numerator == denominator) {
    check(cudaMemcpyAsync(into, other, size_t(words) * sizeof *into, cudaMemcpyDeviceToDevice, stream_of(launch)),
          "cudaMemcpyAsync");
    return;
  }
  draw({into, other, words, word_offset, binary_digits(numerator, denominator), *key}, launch);
}

void bernoulli_words(uint64_t* out, int64_t words, uint64_t numerator, uint64_t denominator, const Stream* key,
                     int64_t word_offset, Launch launch) {
  if (words == 0) return;
  if (numerator == denominator) {
    check(cudaMemsetAsync(out, 0xff, size_t(words) * sizeof *out, stream_of(launch)), "cudaMemsetAsync");
    return;
  }
  draw({out, nullptr, words, word_offset, binary_digits(numerator, denominator), *key}, launch);
}

}  // namespace hvc
