// QSGD with packed codes: records of a norm and codes, made, averaged and decoded. A warp takes a record.
#include "rules/qsgd.h"

#include "kept_blocks.h"
#include "visit.h"

namespace hvc {
namespace {

// What the tensors of a bucket have in common.
struct Rule {
  QsgdShape shape;
  Stream key;
};

struct QsgdFold {
  PartList<uint8_t> parts;
  int64_t part_count, blocks;
  Rule rule;
  int64_t offset;
  uint8_t* out;
};

// What the codes of a record share.
struct Record {
  const uint8_t* codes;
  int64_t begin;  // the first element
  float norm;
};

template <bool kBytes> __device__ int32_t code_at(const uint8_t* codes, int64_t i, int bits) {
  return kBytes ? int8_t(codes[i]) : packed_code(codes, i, bits);
}

// Writes the codes of the `count` values of a block, and codes 0 up to its end. `kept` are the first of them, or what
// has to be fetched again.
template <class W, class Fetch> __device__ void put_codes(const Rule& rule, int count, float norm, int64_t offset,
                                                          uint8_t* into, const Fetch& fetch, Kept<W>& kept) {
  const int bits = rule.shape.bits, block = int(rule.shape.block);
  const Packing packing(bits);
  const float limit = level_limit(levels_of(bits));
  const Scaling<W> scaling = scaling_for(W(norm), W(limit));
  for (int first = 0; first < block; first += kKept) {
    if (count > kKept) kept = fetch(first);
    each_kept_go(first, block, [&](int g, int begin) {
      uint32_t mine[kOfLane] = {};
      const auto encode = [&](const auto& go) {
        each_drawn(
            rule.key, offset, go, [](int64_t, NoRows) { return Nothing(); },
            [&](const Place& place, Nothing, NoRows, uint32_t random) {
              mine[place.k] = uint32_t(level_of(scaled(kept.x[g][place.k], scaling), limit, random));
            });
      };
      if (begin + kOfWarp <= count)
        encode(Go<true, NoRows>{begin, count, NoRows()});
      else if (begin < count)
        encode(Go<false, NoRows>{begin, count, NoRows()});
      put_packed(mine, packing, into + begin / kPacked * bits,
                 int(packed_bytes(min(block - begin, int(kOfWarp)), bits)));
    });
  }
}

// ---- kernels ----------------------------------------------------------------------------------------------

// Writes record i of a tensor, and counts elements that are not finite.
template <class T>
__device__ void encode_record(const QsgdEncoded& e, const Rule& rule, int64_t i, int64_t* nonfinite) {
  using W = Work<T>;
  const int64_t begin = i * rule.shape.block;
  const int count = int(min(rule.shape.block, e.count - begin));
  const T* x = static_cast<const T*>(e.grad) + begin;
  const auto fetch = [&](int first) { return values_of(x, count, first); };
  Kept<W> kept;
  const Measured found = measured(rule.shape.norm, count, fetch, kept);
  add_count(nonfinite, found.nonfinite);
  uint8_t* record = e.records + i * record_bytes(rule.shape.block, rule.shape.bits);
  put_norm(record, found.norm);
  put_codes<W>(rule, count, found.norm, e.offset + begin, record + kNormBytes, fetch, kept);
}

// Registers for four blocks on a multiprocessor, of several tensors for three, of float64 for two.
template <class T, class Table> constexpr int kBlocks = sizeof(Work<T>) == 8 ? 2 : Table::room > 1 ? 3 : 4;

template <class T, class Table> __global__ void __launch_bounds__(kThreads, kBlocks<T, Table>)
    encode_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule, int64_t* nonfinite) {
  constexpr int64_t kMost = records_at_once(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const QsgdEncoded& e = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost;
    const int64_t end = kMost == 1 ? first + 1 : min(first + kMost, ceil_div(e.count, rule.shape.block));
#pragma unroll 1
    for (int64_t i = first; i < end; ++i) encode_record<T>(e, rule, i, nonfinite + item);
  }
}

// Where a block is too long to be kept, its sums are found twice, for the norm and for the codes.
template <int kBits> __global__ void __launch_bounds__(kThreads, kBits > 0 ? 3 : 2) fold_kernel(QsgdFold f) {
  __shared__ SumsOfGo all[kThreads / kWarp];
  SumsOfGo& room = all[int(threadIdx.x) / kWarp];
  const QsgdShape& shape = f.rule.shape;
  const int block = int(shape.block);
  const int64_t bytes = record_bytes(block, shape.bits);
  for (int64_t i = first_warp(); i < f.blocks; i += warp_stride()) {
    const int64_t at = i * bytes;
    const float power = power_for(largest_norm(f.parts, f.part_count, at));
    const auto fetch = [&](int first) { return sums_of<kBits>(f.parts, f.part_count, at, shape, power, first, room); };
    Kept<float> kept;
    const Measured found = measured(shape.norm, block, fetch, kept);
    const float norm = bounded_sum_norm(found.norm, power, f.part_count);
    // `out` may be a part: all lanes have read what a piece overwrites before any of them writes it, see put_codes(),
    // and norms are written when all codes are.
    uint8_t* record = f.out + at;
    __syncwarp();
    put_codes<float>(f.rule, block, norm, f.offset + i * block, record + kNormBytes, fetch, kept);
    __syncwarp();
    put_norm(record, mean_norm(norm, power, f.part_count));
  }
}

template <bool kBytes, class T, class Table>
__global__ void decode_kernel(const __grid_constant__ Table table, QsgdShape shape, double scale) {
  using W = Work<T>;
  const int64_t bytes = record_bytes(shape.block, shape.bits);
  const auto of_row = [&](const QsgdDecoded& d, int64_t block) {
    const uint8_t* record = d.records + block * bytes;
    return Record{record + kNormBytes, block * shape.block, norm_at(record)};
  };
  const auto rows_of = [&](const QsgdDecoded& d) { return Rows{shape.block, d.count}; };
  each_go_of(table, rows_of, of_row, [&](const QsgdDecoded& d, const auto& go) {
    each_of_go(
        go, [&](int64_t i, const Record& r) { return code_at<kBytes>(r.codes, i - r.begin, shape.bits); },
        [&](const Place& place, int32_t code, const Record& r) {
          static_cast<T*>(d.grad)[place.i] = from_work<T>(decoded(code, W(scale), W(r.norm)));
        });
  });
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void qsgd_encode(const QsgdEncoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, const Stream* key,
                 int64_t* nonfinite, Launch launch) {
  const int64_t in_unit = shape.block * records_at_once(tensor_count > 1);
  const auto units = [&](int64_t i) { return ceil_div(tensors[i].count, in_unit); };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t first) {
      start(encode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table,
            Rule{shape, draws_of(key)}, nonfinite + first);
    });
  });
}

void qsgd_fold(const uint8_t* const* parts, int64_t part_count, int64_t blocks, QsgdShape shape, const Stream* key,
               int64_t offset, uint8_t* out, Launch launch) {
  if (blocks == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  with_bits_of(parts, part_count, shape.bits, [&](auto words) {
    start(fold_kernel<decltype(words)::value>, blocks * kWarp, launch,
          QsgdFold{listed.list(), part_count, blocks, {shape, *key}, offset, out});
  });
}

void qsgd_decode(const QsgdDecoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, double scale,
                 Launch launch) {
  const auto units = units_of_goes(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t) {
      using Table = std::decay_t<decltype(table)>;
      const auto kernel = shape.bits == 8 ? decode_kernel<true, T, Table> : decode_kernel<false, T, Table>;
      start(kernel, table.units() * kWarp, launch, table, shape, scale);
    });
  });
}

}  // namespace hvc
