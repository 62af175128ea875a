// Philox4x32-10 (Salmon et al., SC'11): a counter-based generator, so any word of any stream can be computed
// anywhere, in any order, with no state.
#pragma once
#include "rules/common.h"

namespace hvc {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

// One stream of random bits: Key.words() of the Python side. The low 8 bits of c1 are the digit. Draws of 16 bits, see
// rules/dither.h, are moved by `shift`, modulo 2^16; where nothing is drawn, that is what each of them is.
struct Stream {
  uint32_t k0, k1, c1, c2, c3, shift = 0;
  bool drawn = true;
};

struct Counter {
  uint32_t c0, c1, c2, c3;
};

HVC_RULE Counter philox4x32(Counter c, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t(kPhiloxMultiplier0) * c.c0, p1 = uint64_t(kPhiloxMultiplier1) * c.c2;
    c = {uint32_t(p1 >> 32) ^ c.c1 ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c.c3 ^ k1, uint32_t(p0)};
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return c;
}

// Word `word` of digit `digit`: each 128-bit group of the counter holds two words, low half first.
HVC_RULE uint64_t random_word(const Stream& s, int64_t word, uint32_t digit) {
  const Counter r = philox4x32({uint32_t(word >> 1), s.c1 | digit, s.c2, s.c3}, s.k0, s.k1);
  return word & 1 ? uint64_t(r.c3) << 32 | r.c2 : uint64_t(r.c1) << 32 | r.c0;
}

}  // namespace hvc
