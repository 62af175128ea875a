// Philox4x32-10 for many groups at a time. Included by a body, inside its namespace, after lanes.h.
//
// A 32-bit counter word sits in the low half of a 64-bit lane; the high half holds rubbish that neither the
// 32 x 32 multiplication nor the final assembly looks at. That leaves six operations a round.

HVC_INLINE Words multiply_low_halves(Words a, uint32_t b) {
#if HVC_WIDTH == 64
  return (Words)_mm512_maskz_mul_epu32(__mmask8(-1), (__m512i)a, _mm512_set1_epi64(b));
#elif HVC_WIDTH == 32
  return (Words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (Words)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xffffffffu) * uint64_t(b);
#endif
}

// The round keys of a stream, and its constant counter words.
struct Schedule {
  explicit Schedule(const Stream& s) : c1(s.c1), c2(s.c2), c3(s.c3) {
    for (uint32_t r = 0; r < kPhiloxRounds; ++r) {
      k0[r] = s.k0 + r * kPhiloxWeyl0;
      k1[r] = s.k1 + r * kPhiloxWeyl1;
    }
  }
  uint64_t k0[kPhiloxRounds], k1[kPhiloxRounds];
  uint32_t c1, c2, c3;
};

// The even and the odd words of kWordsPerVector groups.
struct Pairs {
  Words even, odd;
};
constexpr int kWordsPerPairs = 2 * kWordsPerVector;

HVC_INLINE Words counting_from(uint64_t first) {
  Words v;
  for (int i = 0; i < kWordsPerVector; ++i) v[i] = first + uint64_t(i);
  return v;
}

// kDigits consecutive digits at once: independent chains keep the multipliers busy.
template <int kDigits> HVC_INLINE void random_pairs(const Schedule& s, Words groups, uint32_t digit, Pairs* out) {
  Words c0[kDigits], c1[kDigits], c2[kDigits], c3[kDigits];
  for (int d = 0; d < kDigits; ++d) {
    c0[d] = groups;
    c1[d] = Words{} + (s.c1 | (digit + uint32_t(d)));
    c2[d] = Words{} + s.c2;
    c3[d] = Words{} + s.c3;
  }
  for (int round = 0; round < kPhiloxRounds; ++round)
    for (int d = 0; d < kDigits; ++d) {
      const Words p0 = multiply_low_halves(c0[d], kPhiloxMultiplier0);
      const Words p1 = multiply_low_halves(c2[d], kPhiloxMultiplier1);
      c0[d] = (p1 >> 32) ^ c1[d] ^ (Words{} + s.k0[round]);
      c2[d] = (p0 >> 32) ^ c3[d] ^ (Words{} + s.k1[round]);
      c1[d] = p1;
      c3[d] = p0;
    }
  for (int d = 0; d < kDigits; ++d) {
    out[d].even = (c0[d] & 0xffffffffu) | c1[d] << 32;
    out[d].odd = (c2[d] & 0xffffffffu) | c3[d] << 32;
  }
}

// even[0], odd[0], even[1], odd[1], ... as two vectors.
HVC_INLINE void interleave(const Pairs& p, Words& first, Words& second) {
#if defined(__clang__)
  for (int i = 0; i < kWordsPerVector; ++i) {
    const int low = i / 2, high = (kWordsPerVector + i) / 2;
    first[i] = i % 2 ? p.odd[low] : p.even[low];
    second[i] = i % 2 ? p.odd[high] : p.even[high];
  }
#else
  Words low, high;
  for (int i = 0; i < kWordsPerVector; ++i) {
    low[i] = uint64_t(i / 2 + i % 2 * kWordsPerVector);
    high[i] = uint64_t((kWordsPerVector + i) / 2 + i % 2 * kWordsPerVector);
  }
  first = __builtin_shuffle(p.even, p.odd, low);
  second = __builtin_shuffle(p.even, p.odd, high);
#endif
}

// Words of digit 0, sixteen at a time: drawn only where somebody asks, and seldom twice.
class Coins {
 public:
  Coins(const Stream& s, int64_t word_offset) : schedule_(s), word_offset_(word_offset) {}

  uint64_t word(int64_t local) {
    const int64_t word = word_offset_ + local;
    if (word / kCount != tile_) draw(word / kCount);
    return words_[word % kCount];
  }

  // `count` <= 32 bits from element `begin` on.
  uint32_t bits(int64_t begin, int count) {
    const int shift = int(begin % kWordBits);
    uint64_t bits = word(begin / kWordBits) >> shift;
    if (shift + count > kWordBits) bits |= word(begin / kWordBits + 1) << (kWordBits - shift);
    return uint32_t(bits);
  }

 private:
  static constexpr int64_t kCount = 16;

  void draw(int64_t tile) {
    tile_ = tile;
    for (int64_t i = 0; i < kCount; i += kWordsPerPairs) {
      Pairs pairs;
      Words first, second;
      random_pairs<1>(schedule_, counting_from(uint64_t(tile * kCount + i) / 2), 0, &pairs);
      interleave(pairs, first, second);
      store_vector(words_ + i, first);
      store_vector(words_ + i + kWordsPerVector, second);
    }
  }

  Schedule schedule_;
  int64_t word_offset_, tile_ = -1;
  uint64_t words_[kCount];
};
