// LoCo: QSGD's records of gradients and an average of earlier errors, made and averaged. A warp takes a record.
#include "rules/loco.h"

#include "kept_blocks.h"
#include "visit.h"

namespace hvc {
namespace {

// What the tensors of a bucket have in common.
struct Rule {
  QsgdShape shape;
  ErrorRule errors;
};

struct LocoFold {
  PartList<uint8_t> parts;
  int64_t part_count, blocks;
  Rule rule;
  const uint8_t* kept;
  uint8_t *out, *left;
};

// What is kept of a block of errors, which counts `weight` times; none without a record.
template <class W> struct Errors {
  const uint8_t* record;
  int bits;
  W norm, unit, weight;

  __device__ Errors(const ErrorRule& rule, const uint8_t* kept, W counts)
      : record(kept), bits(rule.bits), norm(kept ? norm_at(kept) : 0.0f), unit(unit_of<W>(rule.bits)), weight(counts) {}

  __device__ W operator()(int i) const {
    if (!record) return W(0);
    const uint8_t* codes = record + kNormBytes;
    return decoded(bits == 8 ? code_at<true>(codes, i, bits) : code_at<false>(codes, i, bits), unit, norm) * weight;
  }
};

// Adds errors to the values of a block that a warp keeps from `first` on.
template <class W> __device__ Kept<W> with_errors(Kept<W> kept, const Errors<W>& errors, int count, int first) {
  each_kept([&](int g, int k) {
    const int i = first + lane_index() + kept_at(g, k);
    if (i < count) kept.x[g][k] += errors(i);
  });
  return kept;
}

// Writes the codes of the `count` values of a block, to the nearest level, and codes 0 up to its end. `kept` are the
// first of them, or what has to be fetched again.
template <class W, class Fetch> __device__ void put_nearest(int bits, int block, int count, float norm, uint8_t* into,
                                                            const Fetch& fetch, Kept<W>& kept) {
  const Packing packing(bits);
  const float limit = level_limit(levels_of(bits));
  const Scaling<W> scaling = scaling_for(W(norm), W(limit));
  for (int first = 0; first < block; first += kKept) {
    if (count > kKept) kept = fetch(first);
    each_kept_go(first, block, [&](int g, int begin) {
      uint32_t mine[kOfLane] = {};
      if (begin < count) {
#pragma unroll
        for (int k = 0; k < kOfLane; ++k) mine[k] = uint32_t(level_of(scaled(kept.x[g][k], scaling), limit, kHalf));
      }
      put_packed(mine, packing, into + begin / kPacked * bits,
                 int(packed_bytes(min(block - begin, int(kOfWarp)), bits)));
    });
  }
}

// Writes what is left of the `count` values of a block, and then their record, which may be where they came from. Norms
// are written as mean_norm() has them.
template <class W, class Fetch> __device__ void put_both(const Rule& rule, const Errors<W>& errors, int count,
                                                         float norm, float power, int64_t ranks, uint8_t* record,
                                                         uint8_t* left, const Fetch& fetch, Kept<W>& kept) {
  const int bits = rule.shape.bits, block = int(rule.shape.block);
  const float limit = level_limit(levels_of(bits));
  const Scaling<W> scaling = scaling_for(W(norm), W(limit));
  const W unit = unit_of<W>(bits);
  const auto fetch_errors = [&](int first) {
    Kept<W> found = count > kKept ? fetch(first) : kept;
    each_kept([&](int g, int k) {
      const int i = first + lane_index() + kept_at(g, k);
      if (i >= count) return;
      const W x = found.x[g][k], sent = decoded(level_of(scaled(x, scaling), limit, kHalf), unit, W(norm));
      found.x[g][k] = averaged_error(rule.errors.beta, errors(i), x, W(norm), sent);
    });
    return found;
  };
  Kept<W> lost;
  const float largest = measured(kMaximum, count, fetch_errors, lost).norm;
  put_norm(left, mean_norm(largest, power, ranks));
  put_nearest(rule.errors.bits, block, count, largest, left + kNormBytes, fetch_errors, lost);
  put_nearest(bits, block, count, norm, record + kNormBytes, fetch, kept);
  __syncwarp();
  put_norm(record, mean_norm(norm, power, ranks));
}

// ---- kernels ----------------------------------------------------------------------------------------------

// Writes records i of a tensor, and counts elements that are not finite.
template <class T>
__device__ void encode_record(const LocoEncoded& e, const Rule& rule, int64_t i, int64_t* nonfinite) {
  using W = Work<T>;
  const int64_t block = rule.shape.block, of_kept = record_bytes(block, rule.errors.bits);
  const int count = int(min(block, e.count - i * block));
  const T* x = static_cast<const T*>(e.grad) + i * block;
  const Errors<W> errors(rule.errors, e.kept ? e.kept + i * of_kept : nullptr, W(1));
  const auto fetch = [&](int first) { return with_errors(values_of(x, count, first), errors, count, first); };
  Kept<W> kept;
  const Measured found = measured(rule.shape.norm, count, fetch, kept);
  add_count(nonfinite, found.nonfinite);
  uint8_t* record = e.records + i * record_bytes(block, rule.shape.bits);
  put_both(rule, errors, count, found.norm, 1.0f, 1, record, e.left + i * of_kept, fetch, kept);
}

template <class T, class Table> __global__ void encode_kernel(const __grid_constant__ Table table,
                                                              const __grid_constant__ Rule rule, int64_t* nonfinite) {
  constexpr int64_t kMost = records_at_once(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const LocoEncoded& e = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost;
    const int64_t end = kMost == 1 ? first + 1 : min(first + kMost, ceil_div(e.count, rule.shape.block));
#pragma unroll 1
    for (int64_t i = first; i < end; ++i) encode_record<T>(e, rule, i, nonfinite + item);
  }
}

template <bool kBytes> __global__ void fold_kernel(LocoFold f) {
  const QsgdShape& shape = f.rule.shape;
  const int block = int(shape.block);
  const int64_t bytes = record_bytes(block, shape.bits), of_kept = record_bytes(block, f.rule.errors.bits);
  for (int64_t i = first_warp(); i < f.blocks; i += warp_stride()) {
    const int64_t at = i * bytes;
    const uint8_t* before = f.kept ? f.kept + i * of_kept : nullptr;
    const float largest = largest_norm(f.parts, f.part_count, at);
    const float power = power_for(before && norm_at(before) > largest ? norm_at(before) : largest);
    const Errors<float> errors(f.rule.errors, before, weight_of_kept(power, f.part_count));
    const auto fetch = [&](int first) {
      return with_errors(sums_of<kBytes>(f.parts, f.part_count, at, shape, power, first), errors, block, first);
    };
    Kept<float> kept;
    const Measured found = measured(shape.norm, block, fetch, kept);
    const float norm = bounded_sum_norm(found.norm, power, f.part_count);
    put_both(f.rule, errors, block, norm, power, f.part_count, f.out + at, f.left + i * of_kept, fetch, kept);
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void loco_encode(const LocoEncoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, int kept_bits,
                 double beta, int64_t* nonfinite, Launch launch) {
  clear_counts(nonfinite, tensor_count, launch);
  const int64_t in_unit = shape.block * records_at_once(tensor_count > 1);
  const auto units = [&](int64_t i) { return ceil_div(tensors[i].count, in_unit); };
  const Rule rule{shape, {kept_bits, beta}};
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t first) {
      start(encode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, rule,
            nonfinite + first);
    });
  });
}

void loco_fold(const uint8_t* const* parts, int64_t part_count, int64_t blocks, QsgdShape shape, int kept_bits,
               double beta, const uint8_t* kept, uint8_t* out, uint8_t* left, Launch launch) {
  if (blocks == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  start(shape.bits == 8 ? fold_kernel<true> : fold_kernel<false>, blocks * kWarp, launch,
        LocoFold{listed.list(), part_count, blocks, {shape, {kept_bits, beta}}, kept, out, left});
}

}  // namespace hvc
