// QSGD with packed codes. Compiled once per instruction set.

#include "qsgd_lanes.h"

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

void fold(const QsgdFold& f, int64_t first, int64_t last) {
  Draws draws(*f.key);
  alignas(64) float sums[kMostBlock];
  const int64_t block = f.shape.block, bytes = record_bytes(block, f.shape.bits);
  int64_t ignored = 0;
  for (int64_t i = first; i < last; ++i) {
    const float power = power_for(largest_norm(f.parts, f.part_count, i * bytes));
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
