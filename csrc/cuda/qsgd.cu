// QSGD with packed codes: records of a norm and codes, made, averaged and decoded. A warp takes a record.
#include "hvc/qsgd.h"

#include "blocks_of_codes.h"
#include "parts.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct QsgdEncode {
  const T* grad;
  int64_t count;
  QsgdShape shape;
  Stream key;
  int64_t offset;
  uint8_t* records;
  int64_t* nonfinite;
};

struct QsgdFold {
  PartList<uint8_t> parts;
  int64_t part_count, blocks;
  QsgdShape shape;
  Stream key;
  int64_t offset;
  uint8_t* out;
};

template <class T> struct QsgdDecode {
  const uint8_t* records;
  int64_t count;
  QsgdShape shape;
  double scale;
  T* grad;
};

// ---- codes ------------------------------------------------------------------------------------------------

__device__ inline uint64_t pack_eight_as(int bits, uint64_t bytes) {
  switch (bits) {
    case 2:
      return pack_eight<2>(bytes);
    case 3:
      return pack_eight<3>(bytes);
    case 4:
      return pack_eight<4>(bytes);
    case 5:
      return pack_eight<5>(bytes);
    case 6:
      return pack_eight<6>(bytes);
    case 7:
      return pack_eight<7>(bytes);
    default:
      return bytes;
  }
}

__device__ inline int32_t code_at(const uint8_t* codes, int64_t i, int bits) {
  const int64_t bit = i * bits;
  const int shift = int(bit % 8);
  uint32_t word = codes[bit / 8];
  if (shift + bits > 8) word |= uint32_t(codes[bit / 8 + 1]) << 8;
  return signed_code(word >> shift & ((1u << bits) - 1u), bits);
}

__device__ inline float norm_at(const uint8_t* record) { return bit_cast<float>(load_bytes<uint32_t>(record)); }

// Writes the codes of value(0) to value(count - 1), and codes 0 up to the end of the block: a lane takes eight.
template <class W, class Value>
__device__ void put_codes(const QsgdShape& shape, int64_t count, float norm, const Stream& key, int64_t offset,
                          uint8_t* codes, const Value& value) {
  each_eight_codes<W>(shape, count, norm, key, offset, value, [&](int64_t first, uint64_t bytes) {
    const uint64_t packed = pack_eight_as(shape.bits, bytes);
    for (int i = 0; i < shape.bits; ++i) codes[first / kPacked * shape.bits + i] = uint8_t(packed >> (8 * i));
  });
}

// ---- kernels ----------------------------------------------------------------------------------------------

template <class T> __global__ void encode_kernel(QsgdEncode<T> e) {
  using W = Work<T>;
  const int64_t block = e.shape.block, bytes = record_bytes(block, e.shape.bits);
  int64_t bad = 0;
  for (int64_t i = first_warp(); i < ceil_div(e.count, block); i += warp_stride()) {
    const T* x = e.grad + i * block;
    const int64_t count = min(block, e.count - i * block);
    const auto value = [&](int64_t j) { return W(to_work(x[j])); };
    for (int64_t j = lane_index(); j < count; j += kWarp) bad += !is_finite(x[j]);
    const float norm = norm_of(e.shape.norm, count, value);
    uint8_t* record = e.records + i * bytes;
    put_norm(record, norm);
    put_codes<W>(e.shape, count, norm, e.key, e.offset + i * block, record + kNormBytes, value);
  }
  add_count(e.nonfinite, bad);
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
        const float value = float(code_at(record + kNormBytes, j, f.shape.bits)) * unit;
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

template <class T> __global__ void decode_kernel(QsgdDecode<T> d) {
  using W = Work<T>;
  const int64_t block = d.shape.block, bytes = record_bytes(block, d.shape.bits);
  for (int64_t i = first_item(); i < d.count; i += item_stride()) {
    const uint8_t* record = d.records + i / block * bytes;
    const int32_t code = code_at(record + kNormBytes, i % block, d.shape.bits);
    d.grad[i] = from_work<T>(level_value(code, W(d.scale), W(norm_at(record))));
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void qsgd_encode(const void* grad, Dtype dtype, int64_t count, QsgdShape shape, const Stream* key, int64_t offset,
                 uint8_t* records, int64_t* nonfinite, Launch launch) {
  clear(nonfinite, sizeof *nonfinite, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const QsgdEncode<T> e{static_cast<const T*>(grad), count, shape, *key, offset, records, nonfinite};
    start(encode_kernel<T>, ceil_div(count, shape.block) * kWarp, launch, e);
  });
}

void qsgd_fold(const uint8_t* const* parts, int64_t part_count, int64_t blocks, QsgdShape shape, const Stream* key,
               int64_t offset, uint8_t* out, Launch launch) {
  if (blocks == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  start(fold_kernel, blocks * kWarp, launch, QsgdFold{listed.list(), part_count, blocks, shape, *key, offset, out});
}

void qsgd_decode(const uint8_t* records, Dtype dtype, int64_t count, QsgdShape shape, double scale, void* grad,
                 Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    start(decode_kernel<T>, count, launch, QsgdDecode<T>{records, count, shape, scale, static_cast<T*>(grad)});
  });
}

}  // namespace hvc
