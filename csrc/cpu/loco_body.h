// LoCo. Compiled once per instruction set.

#include "qsgd_lanes.h"

// What is kept of a block of errors, which counts `weight` times; none without a record.
template <class W> class Errors {
 public:
  Errors(const ErrorRule& rule, const uint8_t* record, W weight)
      : rule_(rule), record_(record), norm_(record ? norm_at(record) : W(0)), weight_(weight) {}

  // Calls use(i, error) for `count` elements from one on that begins a chunk.
  template <class Use> HVC_RULE void each(int64_t at, int count, const Use& use) const {
    alignas(64) int8_t codes[kChunk + kPacked] = {};
    const W unit = unit_of<W>(rule_.bits);
    if (record_) unpack_codes_of(rule_.bits, codes, record_ + kNormBytes + at / 8 * rule_.bits, count);
    each_element(count, [&](int i) { use(i, decoded(codes[i], unit, norm_) * weight_); });
  }

 private:
  const ErrorRule& rule_;
  const uint8_t* record_;
  W norm_, weight_;
};

// Writes the record of the `count` values of a block, and what is left of them, over the values first. Norms are
// written as mean_norm() has them.
template <class W> HVC_INLINE void put_both(const QsgdShape& shape, const ErrorRule& rule, const Errors<W>& errors,
                                            uint8_t* record, uint8_t* left, float norm, float power, int64_t ranks,
                                            W* values, int64_t count, Draws& halves) {
  const float written = mean_norm(norm, power, ranks);
  memcpy(record, &written, sizeof written);
  uint8_t* into = record + sizeof written;
  int64_t at = 0, ignored = 0;
  const W unit = unit_of<W>(shape.bits);
  quantise_block(shape, values, count, norm, halves, 0, [&](int8_t* codes, int chunk) {
    const int valid = int(std::max<int64_t>(0, std::min<int64_t>(chunk, count - at)));
    errors.each(at, valid, [&](int i, W kept) {
      values[at + i] = averaged_error(rule.beta, kept, values[at + i], W(norm), decoded(codes[i], unit, W(norm)));
    });
    pack_codes_of(shape.bits, into, codes, chunk);
    into += chunk / 8 * shape.bits;
    at += chunk;
  });
  const float largest = norm_of(kMaximum, values, count, ignored);
  put_record(QsgdShape{rule.bits, shape.block, kMaximum}, left, largest, mean_norm(largest, power, ranks), values,
             count, halves, 0);
}

template <class T> int64_t encode(const LocoEncoded& e, QsgdShape shape, ErrorRule rule, int64_t first, int64_t last) {
  using W = Work<T>;
  Draws halves(hvc::halves());
  alignas(64) W values[kMostBlock];
  const int64_t block = shape.block, bytes = record_bytes(block, shape.bits), kept = record_bytes(block, rule.bits);
  int64_t nonfinite = 0;
  for (int64_t i = first; i < last; ++i) {
    const T* x = static_cast<const T*>(e.grad) + i * block;
    const int64_t count = std::min(block, e.count - i * block);
    const Errors<W> errors(rule, e.kept ? e.kept + i * kept : nullptr, W(1));
    for (int64_t at = 0; at < count; at += kChunk)
      errors.each(at, int(std::min<int64_t>(kChunk, count - at)),
                  [&](int j, W error) { values[at + j] = W(to_work(x[at + j])) + error; });
    const float norm = norm_of(shape.norm, values, count, nonfinite);
    put_both(shape, rule, errors, e.records + i * bytes, e.left + i * kept, norm, 1.0f, 1, values, count, halves);
  }
  return nonfinite;
}

void fold(const LocoFold& f, int64_t first, int64_t last) {
  Draws halves(hvc::halves());
  alignas(64) float sums[kMostBlock];
  const int64_t block = f.shape.block, bytes = record_bytes(block, f.shape.bits),
                kept = record_bytes(block, f.rule.bits);
  int64_t ignored = 0;
  for (int64_t i = first; i < last; ++i) {
    const uint8_t* before = f.kept ? f.kept + i * kept : nullptr;
    const float largest = largest_norm(f.parts, f.part_count, i * bytes);
    const float power = power_for(before && norm_at(before) > largest ? norm_at(before) : largest);
    const Errors<float> errors(f.rule, before, weight_of_kept(power, f.part_count));
    for (int64_t part = 0; part < f.part_count; ++part)
      add_record(f.shape, f.parts[part] + i * bytes, power, part == 0, sums);
    for (int64_t at = 0; at < block; at += kChunk)
      errors.each(at, int(std::min<int64_t>(kChunk, block - at)), [&](int j, float error) { sums[at + j] += error; });
    const float norm = bounded_sum_norm(norm_of(f.shape.norm, sums, block, ignored), power, f.part_count);
    put_both(f.shape, f.rule, errors, f.out + i * bytes, f.left + i * kept, norm, power, f.part_count, sums, block,
             halves);
  }
}
