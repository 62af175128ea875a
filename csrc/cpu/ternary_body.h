// Noise-shaped folding to three values. Compiled once per instruction set.

#include "shaped_lanes.h"

// 64 bytes, one for each lane of a word.
typedef uint8_t Bytes __attribute__((vector_size(HVC_WIDTH)));
constexpr int kByteVectors = kGroupBytes / kWidth;
struct Group {
  Bytes part[kByteVectors];
};

// Adds `value` to the bytes whose bit is 1: those of `bits` from place `at` on.
HVC_INLINE Bytes add_where(Bytes bytes, uint64_t bits, int at, uint8_t value) {
#if HVC_WIDTH == 64
  const __m512i v = (__m512i)bytes;
  return (Bytes)_mm512_mask_add_epi8(v, bits >> at, v, _mm512_set1_epi8(char(value)));
#elif HVC_WIDTH == 32
  const __m256i copies = _mm256_set1_epi32(int(bits >> at));
  const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i one = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i found = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(copies, which), one), one);
  return bytes + ((Bytes)found & value);
#else
  uint64_t found[kWidth / 8];
  for (int i = 0; i < kWidth / 8; ++i) {  // a byte's eight bits, each to the lowest place of a byte of its own
    const uint64_t eight = (bits >> (at + 8 * i) & 0xff) * 0x0101010101010101 & 0x8040201008040201;
    found[i] = (eight + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101;
  }
  return bytes + load_vector<Bytes>(found) * value;
#endif
}

// Takes `value` from the bytes that are at least that; returns which they are.
HVC_INLINE uint64_t take_where(Bytes& bytes, uint8_t value) {
#if HVC_WIDTH == 64
  const __m512i v = (__m512i)bytes, values = _mm512_set1_epi8(char(value));
  const __mmask64 found = _mm512_cmpge_epu8_mask(v, values);
  bytes = (Bytes)_mm512_mask_sub_epi8(v, found, v, values);
  return found;
#else
  const Bytes found = (Bytes)(bytes >= value);
  bytes -= found & value;
#if HVC_WIDTH == 32
  return uint32_t(_mm256_movemask_epi8((__m256i)found));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_epi8((__m128i)found));
#else
  uint64_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= uint64_t(found[i] & 1) << i;
  return bits;
#endif
#endif
}

HVC_INLINE void pack_group(const Trits<uint64_t>* digits, uint8_t* packed) {
  Group group{};
  for (int k = 0; k < kGroupWords; ++k) {
    for (int i = 0; i < kByteVectors; ++i) {
      group.part[i] = add_where(group.part[i], digits[k].least_one, i * kWidth, digit_weight(k));
      group.part[i] = add_where(group.part[i], digits[k].two, i * kWidth, digit_weight(k));
    }
  }
  memcpy(packed, group.part, kGroupBytes);
}

// Takes the digit of one word from the bytes; the most that a byte may hold, beyond what packing writes, counts as 2.
HVC_INLINE Trits<uint64_t> take_digit(Group& group, int k) {
  const uint8_t weight = digit_weight(k);
  Trits<uint64_t> digits;
  for (int i = 0; i < kByteVectors; ++i) {
    digits.least_one |= take_where(group.part[i], weight) << (i * kWidth % kWordBits);
    digits.two |= take_where(group.part[i], weight) << (i * kWidth % kWordBits);
  }
  return digits;
}

void unpack(const uint8_t* packed, uint64_t* bits, uint64_t* zeros, int64_t first, int64_t last) {
  for (int64_t group = first; group < last; ++group) {
    Group bytes;
    memcpy(bytes.part, packed + group * kGroupBytes, kGroupBytes);
    for (int k = kGroupWords - 1; k >= 0; --k) {
      const Trits<uint64_t> digits = take_digit(bytes, k);
      bits[group * kGroupWords + k] = digits.least_one;
      zeros[group * kGroupWords + k] = digits.least_one & ~digits.two;
    }
  }
}

// Trits of as many groups as make whole vectors of words are found first, then packed.
constexpr int64_t kBlockGroups = 8, kBlockWords = kBlockGroups * kGroupWords;

template <int kMost> HVC_INLINE void fold_block(const uint64_t* const* parts, int64_t ranks,
                                                const uint64_t* const* before, uint64_t* const* after, int rows,
                                                int64_t word, int64_t end, Trits<uint64_t>* found) {
  each_bits(word, end, [&](int64_t at, auto zero) {
    using Bits = decltype(zero);
    Counts<Bits, kMost> counts;
    counts.load(before, rows, at);
    Trits<Bits> digits;
    for (int64_t part = 0; part < ranks; ++part)
      ternary_add(load_vector<Bits>(parts[part] + at), counts.row, rows, ranks, digits);
    constexpr int kWords = int(sizeof(Bits) / sizeof(uint64_t));
    uint64_t least_one[kWords], two[kWords];
    memcpy(least_one, &digits.least_one, sizeof digits.least_one);
    memcpy(two, &digits.two, sizeof digits.two);
    for (int i = 0; i < kWords; ++i) found[at - word + i] = {least_one[i], two[i]};
    counts.store(after, rows, at);
  });
}

void fold(const uint64_t* const* parts, int64_t ranks, uint8_t* out, const uint64_t* const* before,
          uint64_t* const* after, int64_t first, int64_t last) {
  with_rows(ternary_states(ranks), [&](auto most, int rows) {
    for (int64_t group = first; group < last; group += kBlockGroups) {
      const int64_t end = std::min(group + kBlockGroups, last);
      Trits<uint64_t> found[kBlockWords];
      fold_block<most>(parts, ranks, before, after, rows, group * kGroupWords, end * kGroupWords, found);
      for (int64_t one = group; one < end; ++one)
        pack_group(found + (one - group) * kGroupWords, out + one * kGroupBytes);
    }
  });
}
