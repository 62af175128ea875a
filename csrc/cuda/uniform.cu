// Standard dithering: integers that add.
#include "rules/uniform.h"

#include "dither.h"
#include "multiples.h"
#include "pack.h"
#include "parts.h"

namespace hvc {
namespace {

// What the tensors of a bucket have in common.
struct Rule {
  int bits;
  int32_t levels;
  Stream key;
};

// ---- kernels ----------------------------------------------------------------------------------------------

template <class T> __device__ int32_t code_of(const UniformEncoded& e, int64_t i, float most, uint32_t random) {
  using W = Work<T>;
  const int64_t row = row_of(i, e.row_length, e.count);
  const Scaling<W> scaling = scaling_for(static_cast<const W*>(e.norms)[row], W(most));
  const float limit = e.bounds ? bounded_limit(most, static_cast<const W*>(e.bounds)[row], scaling) : most;
  return level_of(scaled(W(to_work(static_cast<const T*>(e.grad)[i])), scaling), limit, random);
}

template <class T, class Table>
__global__ void encode_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule) {
  const float most = level_limit(rule.levels);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const UniformEncoded& e = table.items[item];
    each_drawn(rule.key, e.offset, e.count, unit - table.begins[item], [&](int64_t i, uint32_t random) {
      const int32_t code = code_of<T>(e, i, most, random);
      if (rule.bits == 4)
        put_nibble(static_cast<uint8_t*>(e.codes), i, e.count, uint32_t(code));
      else if (rule.bits == 8)
        static_cast<int8_t*>(e.codes)[i] = int8_t(code);
      else
        static_cast<int16_t*>(e.codes)[i] = int16_t(code);
    });
  }
}

// Codes of a number of bits that shares bytes unevenly: a lane takes eight, wherever the stream's groups begin.
template <class T, class Table>
__global__ void encode_packed_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule) {
  const float most = level_limit(rule.levels);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const UniformEncoded& e = table.items[item];
    const int64_t first = ((unit - table.begins[item]) * kWarp + lane_index()) * kPacked;
    if (first >= e.count) continue;
    const EightDraws random = draw_from(rule.key, e.offset + first);
    uint64_t bytes = 0;
#pragma unroll
    for (int i = 0; i < kPacked; ++i)
      if (first + i < e.count) bytes |= uint64_t(uint8_t(code_of<T>(e, first + i, most, random[i]))) << (8 * i);
    put_eight(static_cast<uint8_t*>(e.codes), first, e.count, rule.bits, bytes);
  }
}

__global__ void fold_kernel(PartList<uint8_t> parts, int64_t part_count, int64_t count, int bits, int sum_bits,
                            uint8_t* out) {
  for (int64_t group = first_item(); group < ceil_div(count, int64_t(kPacked)); group += item_stride()) {
    const int64_t first = group * kPacked;
    uint64_t bytes = 0;
    for (int i = 0; i < kPacked && first + i < count; ++i) {
      uint32_t sum = 0;
      for (int64_t part = 0; part < part_count; ++part) sum += uint32_t(packed_code(parts[part], first + i, bits));
      bytes |= uint64_t(uint8_t(sum)) << (8 * i);
    }
    put_eight(out, first, count, sum_bits, bytes);
  }
}

__global__ void add_codes_kernel(void* into, const void* other, int64_t count, int bits) {
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    if (bits == 16) {
      auto* sums = static_cast<uint16_t*>(into);
      sums[i] = uint16_t(sums[i] + static_cast<const uint16_t*>(other)[i]);
    } else {
      auto* sums = static_cast<uint8_t*>(into);
      const uint8_t more = static_cast<const uint8_t*>(other)[i];
      sums[i] = bits == 4 ? add_nibbles(sums[i], more) : uint8_t(sums[i] + more);
    }
  }
}

struct LevelOf {
  int bits;
  __device__ int32_t operator()(const void* codes, int64_t i) const {
    if (bits == 16) return static_cast<const int16_t*>(codes)[i];
    if (bits == 8) return static_cast<const int8_t*>(codes)[i];
    if (bits != 4) return packed_code(static_cast<const uint8_t*>(codes), i, bits);
    const uint8_t both = static_cast<const uint8_t*>(codes)[i / 2];
    return i % 2 != 0 ? odd_nibble(both) : even_nibble(both);
  }
};

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void uniform_encode(const UniformEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits, int32_t levels,
                    const Stream* key, Launch launch) {
  const bool packed = bits < 8 && bits != 4;
  const auto units = [&](int64_t i) {
    const UniformEncoded& t = tensors[i];
    return packed ? ceil_div(t.count, int64_t(kWarp * kPacked)) : drawn_units(t.offset, t.count);
  };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t) {
      using Table = std::decay_t<decltype(table)>;
      const auto kernel = packed ? encode_packed_kernel<T, Table> : encode_kernel<T, Table>;
      start(kernel, table.units() * kWarp, launch, table, Rule{bits, levels, *key});
    });
  });
}

void uniform_add(void* into, const void* other, int64_t count, int bits, Launch launch) {
  start(add_codes_kernel, count, launch, into, other, count, bits);
}

void uniform_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int bits, int sum_bits, uint8_t* out,
                  Launch launch) {
  if (count == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  start(fold_kernel, ceil_div(count, int64_t(kPacked)), launch, listed.list(), part_count, count, bits, sum_bits, out);
}

void uniform_decode(const UniformDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits, double scale,
                    Launch launch) {
  decode_multiples(tensors, tensor_count, dtype, LevelOf{bits}, scale, launch);
}

}  // namespace hvc
