// Standard dithering. Compiled once per instruction set.

#include "dither_lanes.h"

#include "pack_lanes.h"

template <int kBits> using Code = std::conditional_t<kBits == 16, int16_t, int8_t>;

template <int kBits, class T> void encode(const UniformEncoded& e, const LevelRule& rule, int64_t first, int64_t last) {
  const auto *norms = static_cast<const Work<T>*>(e.norms), *bounds = static_cast<const Work<T>*>(e.bounds);
  Draws draws(*rule.key);
  const float most = level_limit(rule.levels);
  alignas(64) float z[kChunk];
  alignas(64) Code<kBits> codes[kChunk + 1];
  each_part(first, last, e.row_length, [&](int64_t row, int64_t begin, int count) {
    const uint16_t* random = draws.from(e.offset + begin, count);
    const Scaling<Work<T>> scaling = scaling_for(norms[row], Work<T>(most));
    const float limit = bounds ? bounded_limit(most, bounds[row], scaling) : most;
    scale_part(static_cast<const T*>(e.grad) + begin, count, scaling, z);
    if constexpr (kBits == kAnyBits) {
      each_element(count, [&](int i) { codes[i] = int8_t(level_of(z[i], limit, random[i])); });
      pack_codes_of(rule.bits, static_cast<uint8_t*>(e.codes) + packed_bytes(begin, rule.bits), codes, count);
    } else if constexpr (kBits == 4) {
      each_element(count, [&](int i) { codes[i] = int8_t(level_of(z[i], limit, random[i])); });
      pack_codes(static_cast<uint8_t*>(e.codes) + begin / 2, reinterpret_cast<uint8_t*>(codes), count);
    } else {
      Code<kBits>* out = static_cast<Code<kBits>*>(e.codes) + begin;
      each_element(count, [&](int i) { out[i] = Code<kBits>(level_of(z[i], limit, random[i])); });
    }
  });
}

template <int kBits, class T> void decode(const UniformDecoded& d, int bits, double by, int64_t first, int64_t last) {
  using W = Work<T>;
  const bool streamed = streams(d.count * int64_t(sizeof(T)));
  alignas(64) W values[kChunk];
  each_part(first, last, d.row_length, [&](int64_t row, int64_t begin, int count) {
    const W norm = static_cast<const W*>(d.norms)[row], scale = W(by);
    if constexpr (kBits == kAnyBits) {
      alignas(64) int8_t codes[kChunk];
      unpack_codes_of(bits, codes, static_cast<const uint8_t*>(d.codes) + packed_bytes(begin, bits), count);
      each_element(count, [&](int i) { values[i] = decoded(codes[i], scale, norm); });
    } else if constexpr (kBits == 4) {
      const uint8_t* from = static_cast<const uint8_t*>(d.codes) + begin / 2;
      for (int i = 0; i < count / 2; ++i) {
        values[2 * i] = decoded(even_nibble(from[i]), scale, norm);
        values[2 * i + 1] = decoded(odd_nibble(from[i]), scale, norm);
      }
      if (count % 2 != 0) values[count - 1] = decoded(even_nibble(from[count / 2]), scale, norm);
    } else {
      const Code<kBits>* from = static_cast<const Code<kBits>*>(d.codes) + begin;
      each_element(count, [&](int i) { values[i] = decoded(from[i], scale, norm); });
    }
    put_part(static_cast<T*>(d.grad) + begin, values, count, streamed);
  });
  stream_fence();
}

void add_bytes(uint8_t* into, const uint8_t* other, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) into[i] = uint8_t(into[i] + other[i]);
}
void add_shorts(uint16_t* into, const uint16_t* other, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) into[i] = uint16_t(into[i] + other[i]);
}
void add_packed(uint8_t* into, const uint8_t* other, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) into[i] = add_nibbles(into[i], other[i]);
}

void fold(const UniformFold& f, int64_t first, int64_t last) {
  alignas(64) int8_t sums[kChunk], codes[kChunk];
  for (; first < last; first += kChunk) {
    const int count = int(std::min<int64_t>(kChunk, last - first));
    for (int64_t part = 0; part < f.part_count; ++part) {
      const uint8_t* from = f.parts[part] + packed_bytes(first, f.bits);
      unpack_codes_of(f.bits, part == 0 ? sums : codes, from, count);
      if (part != 0) each_element(count, [&](int i) { sums[i] = int8_t(uint8_t(sums[i]) + uint8_t(codes[i])); });
    }
    pack_codes_of(f.sum_bits, f.out + packed_bytes(first, f.sum_bits), sums, count);
  }
}
