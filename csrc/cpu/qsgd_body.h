// QSGD with packed codes. Compiled once per instruction set.

#include "qsgd_lanes.h"

#include "pack_lanes.h"

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

// The shape is a copy here and below: for all the compiler knows, bytes that are written could lie in another's.
template <class T>
int64_t encode(const QsgdEncoded& e, QsgdShape shape, const Stream& key, int64_t first, int64_t last) {
  Draws draws(key);
  const int64_t block = shape.block, bytes = record_bytes(block, shape.bits);
  int64_t nonfinite = 0;
  for (int64_t i = first; i < last; ++i) {
    const T* x = static_cast<const T*>(e.grad) + i * block;
    const int64_t count = std::min(block, e.count - i * block);
    const float norm = norm_of(shape.norm, x, count, nonfinite);
    put_record(shape, e.records + i * bytes, norm, norm, x, count, draws, e.offset + i * block);
  }
  return nonfinite;
}

HVC_INLINE float largest_norm(const QsgdFold& f, int64_t at) {
  float largest = 0;
  for (int64_t part = 0; part < f.part_count; ++part) {
    const float norm = norm_at(f.parts[part] + at);
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

void fold(const QsgdFold& f, int64_t first, int64_t last) {
  Draws draws(*f.key);
  alignas(64) float sums[kMostBlock];
  const int64_t block = f.shape.block, bytes = record_bytes(block, f.shape.bits);
  int64_t ignored = 0;
  for (int64_t i = first; i < last; ++i) {
    const float power = power_for(largest_norm(f, i * bytes));
    for (int64_t part = 0; part < f.part_count; ++part)
      add_record(f.shape, f.parts[part] + i * bytes, power, part == 0, sums);
    const float norm = bounded_sum_norm(norm_of(f.shape.norm, sums, block, ignored), power, f.part_count);
    put_record(f.shape, f.out + i * bytes, norm, mean_norm(norm, power, f.part_count), sums, block, draws,
               f.offset + i * block);
  }
}

template <class T> void decode(const QsgdDecoded& d, QsgdShape shape, double by, int64_t first, int64_t last) {
  using W = Work<T>;
  const bool streamed = streams(d.count * int64_t(sizeof(T)));
  alignas(64) int8_t codes[kChunk];
  alignas(64) W values[kChunk];
  const int64_t block = shape.block, bytes = record_bytes(block, shape.bits);
  for (int64_t i = first; i < last; ++i) {
    const uint8_t* from = d.records + i * bytes;
    const W norm = norm_at(from), scale = W(by);
    from += kNormBytes;
    const int64_t begin = i * block, end = std::min(begin + block, d.count);
    for (int64_t at = begin; at < end; at += kChunk) {
      const int chunk = int(std::min<int64_t>(kChunk, begin + block - at));
      unpack_codes_of(shape.bits, codes, from, chunk);
      from += chunk / 8 * shape.bits;
      const int valid = int(std::min<int64_t>(chunk, end - at));
      each_element(valid, [&](int j) { values[j] = decoded(codes[j], scale, norm); });
      put_part(static_cast<T*>(d.grad) + at, values, valid, streamed);
    }
  }
  stream_fence();
}
