// Exponential dithering: signs and exponents that merge in a tree.
#include "rules/exponential.h"

#include "dither.h"
#include "multiples.h"
#include "parts.h"

namespace hvc {
namespace {

// What the tensors of a bucket have in common.
struct Rule {
  int bits;
  PowersOfTwo powers;
  Stream key;
};

struct ExponentialMerge {
  uint8_t* into;
  const uint8_t* other;
  int64_t count;
  int bits;
  Stream key;
  int64_t offset;
};

struct ExponentialFold {
  PartList<uint8_t> parts;
  int64_t part_count, count;
  PowersOfTwo powers;
  Stream key;
  int64_t offset;
  uint8_t* out;
};

__device__ inline uint32_t code_at(const uint8_t* codes, int64_t i, int bits) {
  return bits == 4 ? nibble(codes, i) : codes[i];
}
struct PowerOf {
  int bits;
  int32_t headroom;
  __device__ float operator()(const uint8_t* codes, int64_t i) const {
    return exponential_value(code_at(codes, i, bits), 1u << (bits - 1), headroom);
  }
};
__device__ inline void put_code(uint8_t* codes, int64_t i, int64_t count, int bits, uint32_t code) {
  if (bits == 4)
    put_nibble(codes, i, count, code);
  else
    codes[i] = uint8_t(code);
}

// ---- kernels ----------------------------------------------------------------------------------------------

template <class T, class Table>
__global__ void encode_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule) {
  using W = Work<T>;
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const ExponentialEncoded& e = table.items[item];
    each_drawn(rule.key, e.offset, e.count, unit - table.begins[item], [&](int64_t i, uint32_t random) {
      const W norm = static_cast<const W*>(e.norms)[row_of(i, e.row_length, e.count)];
      const float z = scaled(W(to_work(static_cast<const T*>(e.grad)[i])), scaling_for(norm, W(1)));
      put_code(e.codes, i, e.count, rule.bits, exponential_of(z, rule.powers, 1u << (rule.bits - 1), random));
    });
  }
}

__global__ void merge_kernel(ExponentialMerge m) {
  each_drawn(m.key, m.offset, m.count, [&](int64_t i, uint32_t random) {
    const uint32_t a = code_at(m.into, i, m.bits), b = code_at(m.other, i, m.bits);
    const uint32_t sign_bit = 1u << (m.bits - 1);
    const ExponentialPair<uint32_t> pair = exponential_pair(a, b, sign_bit);
    put_code(m.into, i, m.count, m.bits, exponential_merge(a, b, pair, 1u << pair.trials, random, sign_bit));
  });
}

// Codes of 8 bits: the numbers of all parts are added in their order, and the mean is rounded again.
__global__ void fold_kernel(ExponentialFold f) {
  const float share = 1.0f / float(f.part_count);
  each_drawn(f.key, f.offset, f.count, [&](int64_t i, uint32_t random) {
    float sum = exponential_value(f.parts[0][i], 0x80, f.powers.headroom);
    for (int64_t part = 1; part < f.part_count; ++part)
      sum += exponential_value(f.parts[part][i], 0x80, f.powers.headroom);
    f.out[i] = uint8_t(exponential_of(sum * share, f.powers, 0x80, random));
  });
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void exponential_encode(const ExponentialEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, const Stream* key, Launch launch) {
  const auto units = [&](int64_t i) { return drawn_units(tensors[i].offset, tensors[i].count); };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t) {
      start(encode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table,
            Rule{bits, powers_for(bits, headroom), *key});
    });
  });
}

void exponential_merge(uint8_t* into, const uint8_t* other, int64_t bytes, int bits, const Stream* key, int64_t offset,
                       Launch launch) {
  const int64_t count = bytes * 8 / bits;
  start(merge_kernel, drawn_units(offset, count) * kWarp, launch,
        ExponentialMerge{into, other, count, bits, *key, offset});
}

void exponential_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int32_t headroom,
                      const Stream* key, int64_t offset, uint8_t* out, Launch launch) {
  if (count == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  const ExponentialFold f{listed.list(), part_count, count, powers_for(8, headroom), *key, offset, out};
  start(fold_kernel, drawn_units(offset, count) * kWarp, launch, f);
}

void exponential_decode(const ExponentialDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, double scale, Launch launch) {
  decode_multiples(tensors, tensor_count, dtype, PowerOf{bits, headroom}, scale, launch);
}

}  // namespace hvc
