// QSGD with packed codes: records of a norm and codes, made, averaged and decoded. A warp takes a record.
#include "rules/qsgd.h"

#include "blocks_of_codes.h"
#include "pack.h"
#include "parts.h"
#include "rows.h"
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
  QsgdShape shape;
  Stream key;
  int64_t offset;
  uint8_t* out;
};

// A code with its norm.
struct Code {
  int32_t level;
  float norm;
};

__device__ inline float norm_at(const uint8_t* record) { return bit_cast<float>(load_bytes<uint32_t>(record)); }

// Writes the codes of value(0) to value(count - 1), and codes 0 up to the end of the block: a lane takes eight.
template <class W, class Value> __device__ void put_codes(const QsgdShape& shape, int64_t count, float norm,
                                                          const Stream& key, int64_t offset, uint8_t* codes,
                                                          const Value& value) {
  each_eight_codes<W>(shape, count, norm, key, offset, value, [&](int64_t first, uint64_t bytes) {
    const uint64_t packed = pack_eight_as(shape.bits, bytes);
    for (int i = 0; i < shape.bits; ++i) codes[first / kPacked * shape.bits + i] = uint8_t(packed >> (8 * i));
  });
}

// ---- kernels ----------------------------------------------------------------------------------------------

template <class T, class Table> __global__ void encode_kernel(const __grid_constant__ Table table,
                                                              const __grid_constant__ Rule rule, int64_t* nonfinite) {
  using W = Work<T>;
  const int64_t block = rule.shape.block, bytes = record_bytes(block, rule.shape.bits);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const QsgdEncoded& e = table.items[item];
    const int64_t i = unit - table.begins[item], begin = i * block, count = min(block, e.count - begin);
    const T* x = static_cast<const T*>(e.grad) + begin;
    const auto value = [&](int64_t j) { return W(to_work(x[j])); };
    int64_t bad = 0;
    for (int64_t j = lane_index(); j < count; j += kWarp) bad += !is_finite(x[j]);
    add_count(nonfinite + item, bad);
    const float norm = norm_of(rule.shape.norm, count, value);
    uint8_t* record = e.records + i * bytes;
    put_norm(record, norm);
    put_codes<W>(rule.shape, count, norm, rule.key, e.offset + begin, record + kNormBytes, value);
  }
}

// Sums are found twice, for the norm and for the codes: a block has no place to be kept.
__global__ void fold_kernel(QsgdFold f) {
  const int64_t block = f.shape.block, bytes = record_bytes(block, f.shape.bits);
  const int32_t levels = levels_of(f.shape.bits);
  for (int64_t i = first_warp(); i < f.blocks; i += warp_stride()) {
    const int64_t at = i * bytes;
    float largest = 0;
    for (int64_t part = 0; part < f.part_count; ++part) largest = max(largest, norm_at(f.parts[part] + at));
    const float power = power_for(largest);
    const auto sum = [&](int64_t j) {
      float total = 0;
      for (int64_t part = 0; part < f.part_count; ++part) {
        const uint8_t* record = f.parts[part] + at;
        const float unit = fold_unit(norm_at(record), power, levels);
        const float value = float(packed_code(record + kNormBytes, j, f.shape.bits)) * unit;
        total = part == 0 ? value : total + value;
      }
      return total;
    };
    const float norm = bounded_sum_norm(norm_of(f.shape.norm, block, sum), power, f.part_count);
    // `out` may be a part: a lane overwrites only codes that it alone reads, and norms when all lanes are done.
    uint8_t* record = f.out + at;
    __syncwarp();
    put_codes<float>(f.shape, block, norm, f.key, f.offset + i * block, record + kNormBytes, sum);
    __syncwarp();
    put_norm(record, mean_norm(norm, power, f.part_count));
  }
}

template <class T, class Table>
__global__ void decode_kernel(const __grid_constant__ Table table, QsgdShape shape, double scale) {
  using W = Work<T>;
  const int64_t bytes = record_bytes(shape.block, shape.bits);
  const auto load = [&](const QsgdDecoded& d, int64_t i) {
    const int64_t block = row_of(i, shape.block, d.count);
    const uint8_t* record = d.records + block * bytes;
    return Code{packed_code(record + kNormBytes, i - block * shape.block, shape.bits), norm_at(record)};
  };
  each_loaded_of(table, load, [&](const QsgdDecoded& d, int64_t i, const Code& code) {
    static_cast<T*>(d.grad)[i] = from_work<T>(decoded(code.level, W(scale), W(code.norm)));
  });
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void qsgd_encode(const QsgdEncoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, const Stream* key,
                 int64_t* nonfinite, Launch launch) {
  clear_counts(nonfinite, tensor_count, launch);
  const auto units = [&](int64_t i) { return ceil_div(tensors[i].count, shape.block); };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t first) {
      start(encode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, Rule{shape, *key},
            nonfinite + first);
    });
  });
}

void qsgd_fold(const uint8_t* const* parts, int64_t part_count, int64_t blocks, QsgdShape shape, const Stream* key,
               int64_t offset, uint8_t* out, Launch launch) {
  if (blocks == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  start(fold_kernel, blocks * kWarp, launch, QsgdFold{listed.list(), part_count, blocks, shape, *key, offset, out});
}

void qsgd_decode(const QsgdDecoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, double scale,
                 Launch launch) {
  const auto units = units_in_one_go(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t) {
      start(decode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, shape, scale);
    });
  });
}

}  // namespace hvc
