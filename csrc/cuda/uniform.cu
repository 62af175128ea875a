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

// What the elements of a row share.
template <class W> struct RowOfLevels {
  Scaling<W> scaling;
  float limit;
};

// Calls body(tensor, go) for this warp's part of all tensors.
template <class W, class Table, class Body>
__device__ void each_go_of_levels(const Table& table, const Rule& rule, const Body& body) {
  const float most = level_limit(rule.levels);
  const auto of_row = [&](const UniformEncoded& e, int64_t row) {
    const Scaling<W> scaling = scaling_for(static_cast<const W*>(e.norms)[row], W(most));
    return RowOfLevels<W>{scaling,
                          e.bounds ? bounded_limit(most, static_cast<const W*>(e.bounds)[row], scaling) : most};
  };
  each_go_of(table, of_row, body);
}

// Calls use(place, code) for a lane's elements of a go.
template <class T, class AGo, class Use>
__device__ void each_code(const UniformEncoded& e, const AGo& go, const Stream& key, const Use& use) {
  using W = Work<T>;
  each_drawn(
      key, e.offset, go, [&](int64_t i, const RowOfLevels<W>&) { return static_cast<const T*>(e.grad)[i]; },
      [&](const Place& place, T x, const RowOfLevels<W>& row, uint32_t random) {
        use(place, uint32_t(level_of(scaled(W(to_work(x)), row.scaling), row.limit, random)));
      });
}

template <class Codes, class T, class Table>
__global__ void encode_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule) {
  each_go_of_levels<Work<T>>(table, rule, [&](const UniformEncoded& e, const auto& go) {
    each_code<T>(e, go, rule.key, [&](const Place& place, uint32_t code) { Codes::put(e.codes, place, code); });
  });
}

// Codes of a number of bits that shares bytes unevenly: a lane packs eight neighbours, from the block's shared memory.
template <class T, class Table>
__global__ void encode_packed_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule) {
  __shared__ uint64_t codes[kThreads];
  uint64_t* of_warp = codes + int(threadIdx.x) / kWarp * kWarp;
  each_go_of_levels<Work<T>>(table, rule, [&](const UniformEncoded& e, const auto& go) {
    __syncwarp();  // all lanes have packed what was there
    each_code<T>(e, go, rule.key, [&](const Place& place, uint32_t code) {
      reinterpret_cast<uint8_t*>(of_warp)[place.k * kWarp + lane_index()] = uint8_t(code);
    });
    __syncwarp();
    const int64_t first = go.first + lane_index() * kPacked, left = e.count - first;
    if (left <= 0) return;
    const uint64_t behind = left < kPacked ? ~uint64_t(0) << (8 * left) : 0;
    put_eight(static_cast<uint8_t*>(e.codes), first, e.count, rule.bits, of_warp[lane_index()] & ~behind);
  });
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

template <class Number> struct WholeLevels {
  __device__ Number load(const void* codes, int64_t i) const { return static_cast<const Number*>(codes)[i]; }
  __device__ int32_t operator()(Number code, int64_t) const { return code; }
};
struct NibbleLevels {
  __device__ uint8_t load(const void* codes, int64_t i) const {
    return static_cast<const uint8_t*>(codes)[uint64_t(i) / 2];
  }
  __device__ int32_t operator()(uint8_t both, int64_t i) const { return i & 1 ? odd_nibble(both) : even_nibble(both); }
};
struct PackedLevels {
  int bits;
  __device__ int32_t load(const void* codes, int64_t i) const {
    return packed_code(static_cast<const uint8_t*>(codes), i, bits);
  }
  __device__ int32_t operator()(int32_t code, int64_t) const { return code; }
};

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void uniform_encode(const UniformEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits, int32_t levels,
                    const Stream* key, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units_of_goes(tensors, tensor_count), [&](const auto& table, int64_t) {
      using Table = std::decay_t<decltype(table)>;
      const auto kernel = bits == 4    ? encode_kernel<Nibbles, T, Table>
                          : bits == 8  ? encode_kernel<Whole<int8_t>, T, Table>
                          : bits == 16 ? encode_kernel<Whole<int16_t>, T, Table>
                                       : encode_packed_kernel<T, Table>;
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
  const auto decode = [&](auto levels) { decode_multiples(tensors, tensor_count, dtype, levels, scale, launch); };
  if (bits == 4)
    decode(NibbleLevels());
  else if (bits == 8)
    decode(WholeLevels<int8_t>());
  else if (bits == 16)
    decode(WholeLevels<int16_t>());
  else
    decode(PackedLevels{bits});
}

}  // namespace hvc
