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
  each_go_of(table, OwnRows(), of_row, body);
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

// Codes that share bytes: eight neighbours are packed at once.
template <class T, class Table>
__global__ void encode_packed_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule) {
  const Packing packing(rule.bits);
  each_go_of_levels<Work<T>>(table, rule, [&](const UniformEncoded& e, const auto& go) {
    uint32_t mine[kOfLane] = {};
    each_code<T>(e, go, rule.key, [&](const Place& place, uint32_t code) { mine[place.k] = code; });
    put_packed(mine, packing, static_cast<uint8_t*>(e.codes) + go.first / kPacked * rule.bits,
               int(packed_bytes(min(e.count - go.first, kOfWarp), rule.bits)));
  });
}

// A lane adds the codes of eight neighbours, in the bytes of one number: those of all parts, less half of what a code
// can be, and then so many halves.
__global__ void fold_kernel(PartList<uint8_t> parts, int64_t part_count, bool words, int64_t count, int bits,
                            int sum_bits, uint8_t* out) {
  constexpr uint64_t kBytes = every(8, 1), kTops = kBytes << 7;
  __shared__ uint64_t codes[kThreads];
  uint64_t* of_warp = codes + int(threadIdx.x) / kWarp * kWarp;
  const Packing packing(bits), packing_sums(sum_bits);
  const uint64_t half = uint64_t(1) << (bits - 1);
  // With fetch(a part's codes from this go on); those of several parts are under way at once.
  const auto sum = [&](int64_t behind, const auto& fetch) {
    uint64_t sums = kBytes * uint8_t(0 - uint64_t(part_count) * half);
#pragma unroll 4
    for (int64_t part = 0; part < part_count; ++part)
      sums = add_beside(sums, packing.unpack(fetch(parts[part] + behind)) ^ kBytes * half, kTops);
    return sums;
  };
  each_go_of(count, [&](const auto& go) {
    const int64_t behind = go.first / kPacked * bits, left = count - go.first - lane_index() * kPacked;
    if (go.whole && words) {
      of_warp[lane_index()] =
          sum(behind, [&](const uint8_t* groups) { return load_group(groups, bits, lane_index(), kWarp); });
    } else {
      const int used = left <= 0 ? 0 : int(packed_bytes(min(left, int64_t(kPacked)), bits));
      of_warp[lane_index()] = bytes_before_end(
          sum(behind, [&](const uint8_t* groups) { return load_bytes_of_group(groups + lane_index() * bits, used); }),
          left);
    }
    put_packed(of_warp, packing_sums, out + go.first / kPacked * sum_bits,
               int(packed_bytes(min(count - go.first, kOfWarp), sum_bits)));
  });
}

// Codes lie side by side in numbers of eight bytes, of which there are `words`, and in `count` smaller ones behind
// them.
template <class Number>
__global__ void add_codes_kernel(Number* into, const Number* other, int64_t words, int64_t count, uint64_t tops) {
  auto* sums = reinterpret_cast<uint64_t*>(into);
  const auto* more = reinterpret_cast<const uint64_t*>(other);
  each_go_of(words, [&](const auto& go) {
    each_of_go(
        go, [&](int64_t i, NoRows) { return Two<uint64_t>{sums[i], more[i]}; },
        [&](const Place& place, const Two<uint64_t>& x, NoRows) { sums[place.i] = add_beside(x.mine, x.other, tops); });
  });
  const int64_t behind = words * int64_t(sizeof *sums / sizeof *into);
  for (int64_t i = behind + first_item(); i < behind + count; i += item_stride())
    into[i] = Number(add_beside(into[i], other[i], tops));
}

// `count` numbers with several codes in each, or one.
template <class Number> void add_codes(void* into, const void* other, int64_t count, uint64_t tops, Launch launch) {
  constexpr int64_t kInWord = sizeof(uint64_t) / sizeof(Number);
  const bool aligned = (reinterpret_cast<uintptr_t>(into) | reinterpret_cast<uintptr_t>(other)) % sizeof(uint64_t) == 0;
  const int64_t words = aligned ? count / kInWord : 0, rest = count - words * kInWord;
  start(add_codes_kernel<Number>, std::max(units_of_goes(words) * kWarp, rest), launch, static_cast<Number*>(into),
        static_cast<const Number*>(other), words, rest, tops);
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
      const auto kernel = bits == 8    ? encode_kernel<Whole<int8_t>, T, Table>
                          : bits == 16 ? encode_kernel<Whole<int16_t>, T, Table>
                                       : encode_packed_kernel<T, Table>;
      start(kernel, table.units() * kWarp, launch, table, Rule{bits, levels, draws_of(key)});
    });
  });
}

void uniform_add(void* into, const void* other, int64_t count, int bits, Launch launch) {
  if (bits == 16)
    add_codes<uint16_t>(into, other, count, every(16, 1) << 15, launch);
  else
    add_codes<uint8_t>(into, other, count, every(bits, 1) << (bits - 1), launch);
}

void uniform_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int bits, int sum_bits, uint8_t* out,
                  Launch launch) {
  if (count == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  start(fold_kernel, units_of_goes(count) * kWarp, launch, listed.list(), part_count, are_words(parts, part_count),
        count, bits, sum_bits, out);
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
