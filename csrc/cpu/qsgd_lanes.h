// A block of QSGD: its norm, and its codes chunk by chunk. Included by a body, inside its namespace, after lanes.h.
#include "dither_lanes.h"
#include "norm_lanes.h"
#include "pack_lanes.h"

// What is to be known of up to kMostBlock elements; those that are not finite count as 0.
struct Moments {
  double largest, squares;
};

template <class T> HVC_INLINE Moments moments_of(Power power, const T* x, int64_t count, int64_t& nonfinite) {
  using W = Work<T>;
  Bits<T> most = 0;
  Lanes<W> largest = broadcast(W(0));
  double squares = 0;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(kBlock, count - at);
    if (power == kMaximum)
      count_block(x + at, n, most, nonfinite);
    else
      squares += sum_block<kPower2, true>(x + at, n, largest, nonfinite);
  }
  return {power == kMaximum ? double(to_work(bit_cast<T>(most))) : double(largest_of(largest)), squares};
}

template <class T> HVC_INLINE float norm_of(Power power, const T* x, int64_t count, int64_t& nonfinite) {
  const Moments found = moments_of(power, x, count, nonfinite);
  return power == kMaximum ? norm_at_least(found.largest) : norm_from_squares(found.squares, found.largest);
}

// Calls put(codes, chunk) for every chunk of a block; after `count` elements there are codes 0 up to its end.
template <class T, class Put> HVC_INLINE void quantise_block(const QsgdShape& shape, const T* x, int64_t count,
                                                             float norm, Draws& draws, int64_t offset, const Put& put) {
  alignas(64) float z[kChunk];
  alignas(64) int8_t codes[kChunk];
  const float limit = level_limit(levels_of(shape.bits));
  const Scaling<Work<T>> scaling = scaling_for(Work<T>(norm), Work<T>(limit));
  for (int64_t at = 0; at < shape.block; at += kChunk) {
    const int chunk = int(std::min<int64_t>(kChunk, shape.block - at));
    const int valid = int(std::max<int64_t>(0, std::min<int64_t>(chunk, count - at)));
    if (valid > 0) {
      const uint16_t* random = draws.from(offset + at, valid);
      scale_part(x + at, valid, scaling, z);
      each_element(valid, [&](int i) { codes[i] = int8_t(level_of(z[i], limit, random[i])); });
    }
    for (int i = valid; i < chunk; ++i) codes[i] = 0;
    put(codes, chunk);
  }
}

// ---- records ----------------------------------------------------------------------------------------------

HVC_INLINE float norm_at(const uint8_t* record) {
  float norm;
  memcpy(&norm, record, sizeof norm);
  return norm;
}

// Writes the record of a block with a norm for its codes and one that is written: for a sum that of the mean.
template <class T> HVC_INLINE void put_record(const QsgdShape& shape, uint8_t* record, float norm, float written,
                                              const T* x, int64_t count, Draws& draws, int64_t offset) {
  memcpy(record, &written, sizeof written);
  uint8_t* into = record + sizeof written;
  quantise_block(shape, x, count, norm, draws, offset, [&](int8_t* codes, int chunk) {
    pack_codes_of(shape.bits, into, codes, chunk);
    into += chunk / 8 * shape.bits;
  });
}

HVC_INLINE float largest_norm(const uint8_t* const* parts, int64_t part_count, int64_t at) {
  float largest = 0;
  for (int64_t part = 0; part < part_count; ++part) {
    const float norm = norm_at(parts[part] + at);
    largest = norm > largest ? norm : largest;
  }
  return largest;
}

// Adds the numbers of a record, in units of 1 / power.
HVC_INLINE void add_record(const QsgdShape& shape, const uint8_t* record, float power, bool begin, float* sums) {
  const float unit = fold_unit(norm_at(record), power, levels_of(shape.bits));
  with_bits(shape.bits, [&](auto bits) {
    each_numbers<bits()>(record + sizeof unit, shape.block, [&](int64_t i, Numbers numbers) {
      store_vector(sums + i, begin ? numbers * unit : load_vector<Numbers>(sums + i) + numbers * unit);
    });
  });
}
