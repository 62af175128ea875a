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
  double unit, unit_of_errors;  // what a level stands for; a GPU divides slowly
};
Rule rule_of(const QsgdShape& shape, int kept_bits, double beta) {
  return {shape, {kept_bits, beta}, unit_of<double>(shape.bits), unit_of<double>(kept_bits)};
}

struct LocoFold {
  PartList<uint8_t> parts;
  int64_t part_count, blocks;
  Rule rule;
  const uint8_t* kept;
  uint8_t *out, *left;
};

// What a warp keeps in shared memory.
struct Rooms {
  KeptCodes errors, codes;
};

// What is kept of a block of errors, which counts `weight` times; none without a record.
template <class W> struct Errors {
  const uint8_t* record;
  Packing packing;
  W norm, unit, weight;
  KeptCodes& codes;

  __device__ Errors(const Rule& rule, const uint8_t* kept, W counts, KeptCodes& room)
      : record(kept),
        packing(rule.errors.bits),
        norm(kept ? norm_at(kept) : 0.0f),
        unit(W(rule.unit_of_errors)),
        weight(counts),
        codes(room) {}

  // Adds those to the `count` values of a block, of which a warp keeps some from `first` on.
  __device__ Kept<W> with(Kept<W> kept, int block, int count, int first) const {
    put_kept(record ? load_kept(record + kNormBytes, packing.bits, first, block) : PackedCodes{}, packing, codes);
    if (count < block) {  // what fills up the last block of a tensor says nothing
      each_kept_apart([&](int g, int k) {
        if (first + lane_index() + kept_at(g, k) >= count) codes.put(g, k, 0);
      });
    }
    each_kept_apart([&](int g, int k) { kept.x[g][k] += (*this)(g, k); });
    return kept;
  }
  __device__ W operator()(int g, int k) const { return decoded(codes(g, k), unit, norm) * weight; }
};

// How values become codes, to the nearest level.
template <class W> struct Nearest {
  Packing packing;
  float limit;
  Scaling<W> scaling;

  __device__ Nearest(int bits, float norm)
      : packing(bits), limit(level_limit(levels_of(bits))), scaling(scaling_for(W(norm), W(limit))) {}

  __device__ int32_t operator()(W x) const { return level_of(scaled(x, scaling), limit, kHalf); }
};

// Writes what is left of the `count` values of a block, and their record, which may be where they came from: piece by
// piece, when all lanes have read it. `kept` are those of a block that a warp keeps, or what has to be fetched again;
// `norm` is of the codes, and written(norm) is what a record says.
template <class W, class Fetch, class Written>
__device__ void put_both(const Rule& rule, const Errors<W>& errors, int count, float norm, uint8_t* record,
                         uint8_t* left, KeptCodes& codes, const Fetch& fetch, const Written& written, Kept<W>& kept) {
  const int block = int(rule.shape.block);
  const Nearest<W> nearest(rule.shape.bits, norm);
  const W unit = W(rule.unit);
  // What is left of a piece, in its place, and its codes.
  const auto leave = [&](int first) {
    if (block > kKept) kept = fetch(first);
    each_kept_apart([&](int g, int k) {
      const W x = kept.x[g][k];
      const int32_t code = nearest(x);
      codes.put(g, k, code);
      kept.x[g][k] = averaged_error(rule.errors.beta, errors(g, k), x, W(norm), decoded(code, unit, W(norm)));
    });
    return kept;
  };
  const float largest = measured(kMaximum, count, leave, kept).norm;
  const Nearest<W> nearest_left(rule.errors.bits, largest);
  for (int first = 0; first < block; first += kKept) {
    if (block > kKept) leave(first);
    each_kept_go(first, block, [&](int g, int begin) {
      const auto put = [&](const Packing& packing, uint8_t* into) {
        put_packed(codes.of_go[g], packing, into + kNormBytes + begin / kPacked * packing.bits,
                   int(packed_bytes(min(block - begin, int(kOfWarp)), packing.bits)));
      };
      put(nearest.packing, record);
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) codes.put(g, k, nearest_left(kept.x[g][k]));
      put(nearest_left.packing, left);
    });
  }
  put_norm(left, written(largest));
  put_norm(record, written(norm));
}

// ---- kernels ----------------------------------------------------------------------------------------------

// Writes record i of a tensor, and counts elements that are not finite.
template <class T>
__device__ void encode_record(const LocoEncoded& e, const Rule& rule, int64_t i, Rooms& rooms, int64_t* nonfinite) {
  using W = Work<T>;
  const int64_t block = rule.shape.block, of_kept = record_bytes(block, rule.errors.bits);
  const int count = int(min(block, e.count - i * block));
  const T* x = static_cast<const T*>(e.grad) + i * block;
  const Errors<W> errors(rule, e.kept ? e.kept + i * of_kept : nullptr, W(1), rooms.errors);
  const auto fetch = [&](int first) { return errors.with(values_of(x, count, first), int(block), count, first); };
  Kept<W> kept;
  const Measured found = measured(rule.shape.norm, count, fetch, kept);
  add_count(nonfinite, found.nonfinite);
  uint8_t* record = e.records + i * record_bytes(block, rule.shape.bits);
  put_both(
      rule, errors, count, found.norm, record, e.left + i * of_kept, rooms.codes, fetch,
      [](float norm) { return norm; }, kept);
}

// The blocks that a multiprocessor has registers for.
template <class T> constexpr int blocks_at_once(bool several) { return sizeof(T) == 8 ? 1 : several ? 3 : 4; }

template <class T, class Table> __global__ void __launch_bounds__(kThreads, blocks_at_once<T>(Table::room > 1))
    encode_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule, int64_t* nonfinite) {
  __shared__ Rooms rooms[kThreads / kWarp];
  constexpr int64_t kMost = records_at_once(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const LocoEncoded& e = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost;
    const int64_t end = kMost == 1 ? first + 1 : min(first + kMost, ceil_div(e.count, rule.shape.block));
#pragma unroll 1
    for (int64_t i = first; i < end; ++i)
      encode_record<T>(e, rule, i, rooms[int(threadIdx.x) / kWarp], nonfinite + item);
  }
}

template <int kBits> __global__ void __launch_bounds__(kThreads, kBits > 0 ? 3 : 2) fold_kernel(LocoFold f) {
  __shared__ Rooms all[kThreads / kWarp];
  __shared__ SumsOfGo sums[kThreads / kWarp];
  const int warp = int(threadIdx.x) / kWarp;
  Rooms& rooms = all[warp];
  const QsgdShape& shape = f.rule.shape;
  const int block = int(shape.block);
  const int64_t bytes = record_bytes(block, shape.bits), of_kept = record_bytes(block, f.rule.errors.bits);
  for (int64_t i = first_warp(); i < f.blocks; i += warp_stride()) {
    const int64_t at = i * bytes;
    const uint8_t* before = f.kept ? f.kept + i * of_kept : nullptr;
    const float largest = largest_norm(f.parts, f.part_count, at);
    const float power = power_for(before && norm_at(before) > largest ? norm_at(before) : largest);
    const Errors<float> errors(f.rule, before, weight_of_kept(power, f.part_count), rooms.errors);
    const auto fetch = [&](int first) {
      return errors.with(sums_of<kBits>(f.parts, f.part_count, at, shape, power, first, sums[warp]), block, block,
                         first);
    };
    Kept<float> kept;
    const Measured found = measured(shape.norm, block, fetch, kept);
    put_both(
        f.rule, errors, block, bounded_sum_norm(found.norm, power, f.part_count), f.out + at, f.left + i * of_kept,
        rooms.codes, fetch, [&](float norm) { return mean_norm(norm, power, f.part_count); }, kept);
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void loco_encode(const LocoEncoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, int kept_bits,
                 double beta, int64_t* nonfinite, Launch launch) {
  const int64_t in_unit = shape.block * records_at_once(tensor_count > 1);
  const auto units = [&](int64_t i) { return ceil_div(tensors[i].count, in_unit); };
  const Rule rule = rule_of(shape, kept_bits, beta);
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
  with_bits_of(parts, part_count, shape.bits, [&](auto words) {
    start(fold_kernel<decltype(words)::value>, blocks * kWarp, launch,
          LocoFold{listed.list(), part_count, blocks, rule_of(shape, kept_bits, beta), kept, out, left});
  });
}

}  // namespace hvc
