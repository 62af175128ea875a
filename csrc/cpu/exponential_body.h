// Exponential dithering. Compiled once per instruction set.

#include "dither_lanes.h"

typedef uint16_t Shorts __attribute__((vector_size(HVC_WIDTH)));
constexpr int kPerShorts = kWidth / 2;

template <int kBits, int kMantissa, class T>
void encode(const ExponentialEncoded& e, int32_t headroom, const Stream& key, int64_t first, int64_t last) {
  Draws draws(key);
  const PowersOfTwo powers = powers_for(kBits, headroom, kMantissa);
  alignas(64) float z[kChunk];
  alignas(64) uint8_t codes[kChunk + 1];
  each_part(first, last, e.row_length, [&](int64_t row, int64_t begin, int count) {
    const uint16_t* random = draws.from(e.offset + begin, count);
    const Work<T> norm = static_cast<const Work<T>*>(e.norms)[row];
    scale_part(static_cast<const T*>(e.grad) + begin, count, scaling_for(norm, Work<T>(1)), z);
    uint8_t* out = kBits == 4 ? codes : e.codes + begin;
    each_element(
        count, [&](int i) { out[i] = uint8_t(exponential_of<kMantissa>(z[i], powers, 1u << (kBits - 1), random[i])); });
    if (kBits == 4) pack_codes(e.codes + begin / 2, codes, count);
  });
}

template <int kBits, int kMantissa, class T>
void decode(const ExponentialDecoded& d, int32_t headroom, double by, int64_t first, int64_t last) {
  using W = Work<T>;
  const bool streamed = streams(d.count * int64_t(sizeof(T)));
  alignas(64) W values[kChunk];
  alignas(64) uint8_t codes[kChunk + 1];
  each_part(first, last, d.row_length, [&](int64_t row, int64_t begin, int count) {
    const W norm = static_cast<const W*>(d.norms)[row], scale = W(by);
    const uint8_t* from = kBits == 4 ? codes : d.codes + begin;
    if (kBits == 4) unpack_codes(d.codes + begin / 2, codes, count);
    each_element(count, [&](int i) {
      values[i] = decoded(exponential_value<kMantissa>(from[i], 1u << (kBits - 1), headroom), scale, norm);
    });
    put_part(static_cast<T*>(d.grad) + begin, values, count, streamed);
  });
  stream_fence();
}

// 2^t for t < 16. AVX2 cannot shift lanes of 16 bits by as many places each: there a table tells the low byte, and
// the high one too, which is the low byte for 8 places less or more.
HVC_INLINE Shorts power_of_two(Shorts t) {
#if defined(HVC_X86) && HVC_WIDTH == 32
  const __m256i table = _mm256_broadcastsi128_si256(_mm_cvtsi64_si128(int64_t(0x8040201008040201)));
  return (Shorts)_mm256_shuffle_epi8(table, (__m256i)((t << 8 | t) ^ 0x0800));
#else
  return (Shorts{} + 1) << t;
#endif
}

// Whole vectors, in place in `a`: the chunk's buffers have room for them.
HVC_INLINE void merge_codes(uint16_t* a, const uint16_t* b, const uint16_t* random, int count, uint16_t sign_bit) {
  const Shorts sign = Shorts{} + sign_bit;
  for (int i = 0; i < count; i += kPerShorts) {
    const Shorts mine = load_vector<Shorts>(a + i), theirs = load_vector<Shorts>(b + i);
    const ExponentialPair<Shorts> pair = exponential_pair(mine, theirs, sign);
    const Shorts draws = load_vector<Shorts>(random + i);
    store_vector(a + i, exponential_merge(mine, theirs, pair, power_of_two(pair.trials), draws, sign));
  }
}

template <int kBits>
void merge(uint8_t* into, const uint8_t* other, const Stream& key, int64_t offset, int64_t first, int64_t last) {
  constexpr int kPerByte = 8 / kBits;
  Draws draws(key);
  alignas(64) uint16_t a[kChunk] = {}, b[kChunk] = {};
  for (; first < last; first += kChunk / kPerByte) {
    const int bytes = int(std::min<int64_t>(last - first, kChunk / kPerByte)), count = bytes * kPerByte;
    const uint16_t* random = draws.from(offset + first * kPerByte, count);
    uint8_t* mine = into + first;
    const uint8_t* theirs = other + first;
    if constexpr (kBits == 8) {
      each_element(count, [&](int i) { a[i] = mine[i], b[i] = theirs[i]; });
      merge_codes(a, b, random, count, 0x80);
      each_element(count, [&](int i) { mine[i] = uint8_t(a[i]); });
    } else {
      for (int i = 0; i < bytes; ++i) {
        a[2 * i] = mine[i] & 15, a[2 * i + 1] = mine[i] >> 4;
        b[2 * i] = theirs[i] & 15, b[2 * i + 1] = theirs[i] >> 4;
      }
      merge_codes(a, b, random, count, 8);
      for (int i = 0; i < bytes; ++i) mine[i] = uint8_t(a[2 * i] | a[2 * i + 1] << 4);
    }
  }
}

// Codes of 8 bits: the numbers of all parts are added in their order, and the mean is rounded again.
template <int kMantissa> void fold(const ExponentialFold& f, int64_t first, int64_t last) {
  Draws draws(*f.key);
  const PowersOfTwo powers = powers_for(8, f.headroom, kMantissa);
  const float share = 1.0f / float(f.part_count);
  alignas(64) float sums[kChunk];
  for (; first < last; first += kChunk) {
    const int count = int(std::min<int64_t>(last - first, kChunk));
    const uint16_t* random = draws.from(f.offset + first, count);
    for (int64_t part = 0; part < f.part_count; ++part) {
      const uint8_t* codes = f.parts[part] + first;
      if (part == 0)
        each_element(count, [&](int i) { sums[i] = exponential_value<kMantissa>(codes[i], 0x80, f.headroom); });
      else
        each_element(count, [&](int i) { sums[i] += exponential_value<kMantissa>(codes[i], 0x80, f.headroom); });
    }
    uint8_t* out = f.out + first;
    each_element(count,
                 [&](int i) { out[i] = uint8_t(exponential_of<kMantissa>(sums[i] * share, powers, 0x80, random[i])); });
  }
}
