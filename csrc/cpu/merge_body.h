// Random bits of a rational probability, and the merge that uses them. Compiled once per instruction set.

#include "philox_lanes.h"

// Three independent chains of ten dependent rounds fill the multipliers; more of them spill registers.
constexpr int kDigitsAtOnce = kWidth == 64 ? 4 : 2;

template <int kDigits> HVC_INLINE void reveal(const Schedule& schedule, const Digits& p, Words groups, int digit,
                                              Pairs& undecided, Pairs& out) {
  Pairs random[kDigits];
  random_pairs<kDigits>(schedule, groups, uint32_t(digit), random);
  for (int d = 0; d < kDigits; ++d) {
    const bool one = p.ones >> (digit + d) & 1;
    decide(one, random[d].even, undecided.even, out.even);
    decide(one, random[d].odd, undecided.odd, out.odd);
  }
}

HVC_INLINE bool any(Words a) {
  uint64_t either = 0;
  for (int i = 0; i < kWordsPerVector; ++i) either |= a[i];
  return either != 0;
}

// kWordsPerPairs words from an even one on.
HVC_INLINE void bernoulli_vectors(const Schedule& schedule, const Digits& p, int64_t word, Words& first,
                                  Words& second) {
  const Words groups = counting_from(uint64_t(word) / 2);
  Pairs undecided{~Words{}, ~Words{}}, out{};
  int digit = 0;
  while (digit < p.count && any(undecided.even | undecided.odd)) {
    if (digit + kDigitsAtOnce <= p.count) {
      reveal<kDigitsAtOnce>(schedule, p, groups, digit, undecided, out);
      digit += kDigitsAtOnce;
    } else {
      reveal<1>(schedule, p, groups, digit++, undecided, out);
    }
  }
  interleave(out, first, second);
}

// `use(local word, random)` for every word in [first, last): vectors where whole ones fit, words at the ends.
template <class Use> HVC_INLINE void each_bernoulli(const Digits& p, const Stream& stream, int64_t word_offset,
                                                    int64_t first, int64_t last, const Use& use) {
  const Schedule schedule(stream);
  int64_t word = first;
  for (; word < last && (word + word_offset) % 2 != 0; ++word) use(word, bernoulli_word(p, stream, word_offset + word));
  for (; word + kWordsPerPairs <= last; word += kWordsPerPairs) {
    Words low, high;
    bernoulli_vectors(schedule, p, word_offset + word, low, high);
    use(word, low);
    use(word + kWordsPerVector, high);
  }
  for (; word < last; ++word) use(word, bernoulli_word(p, stream, word_offset + word));
}

void bernoulli(uint64_t* out, const Digits& p, const Stream& stream, int64_t word_offset, int64_t first, int64_t last) {
  each_bernoulli(p, stream, word_offset, first, last,
                 [&](int64_t word, auto random) { store_vector(out + word, random); });
}

// b chooses: a bit select is Marsit's operator.
void merge(uint64_t* into, const uint64_t* other, const Digits& p, const Stream& stream, int64_t word_offset,
           int64_t first, int64_t last) {
  each_bernoulli(p, stream, word_offset, first, last, [&](int64_t word, auto random) {
    using Bits = decltype(random);
    const Bits mine = load_vector<Bits>(into + word), theirs = load_vector<Bits>(other + word);
    store_vector(into + word, mine ^ ((mine ^ theirs) & random));
  });
}
