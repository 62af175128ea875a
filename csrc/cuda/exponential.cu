// Exponential dithering: signs and exponents that merge in a tree.
#include "rules/exponential.h"

#include "dither.h"
#include "multiples.h"
#include "parts.h"

namespace hvc {
namespace {

// What the tensors of a bucket have in common.
struct Rule {
  PowersOfTwo powers;
  Stream key;
};

struct ExponentialMerge {
  uint8_t* into;
  const uint8_t* other;
  int64_t count;
  Stream key;
  int64_t offset;
  bool aligned;
};

struct ExponentialFold {
  PartList<uint8_t> parts;
  int64_t part_count, count;
  PowersOfTwo powers;
  Stream key;
  int64_t offset;
  uint8_t* out;
  bool aligned;  // `out` and the parts, for eight codes at a time
};

template <class Codes> constexpr int kBits = std::is_same<Codes, Nibbles>::value ? 4 : 8;
template <class Codes> constexpr uint32_t kSignBit = 1u << (kBits<Codes> - 1);

template <class Codes> struct PowerOf {
  int32_t headroom;
  __device__ uint8_t load(const void* codes, int64_t i) const { return Codes::get(codes, i); }
  __device__ float operator()(uint8_t code, int64_t) const {
    return exponential_value(code, kSignBit<Codes>, headroom);
  }
};

// Calls run(how codes of so many bits lie).
template <class Run> void with_codes(int bits, const Run& run) {
  if (bits == 4)
    run(Nibbles());
  else
    run(Whole<uint8_t>());
}

// ---- kernels ----------------------------------------------------------------------------------------------

template <class Codes, class T, class Table>
__global__ void encode_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule) {
  using W = Work<T>;
  const auto of_row = [](const ExponentialEncoded& e, int64_t row) {
    return scaling_for(static_cast<const W*>(e.norms)[row], W(1));
  };
  each_go_of(table, OwnRows(), of_row, [&](const ExponentialEncoded& e, const auto& go) {
    each_drawn(
        rule.key, e.offset, go, [&](int64_t i, const Scaling<W>&) { return static_cast<const T*>(e.grad)[i]; },
        [&](const Place& place, T x, const Scaling<W>& scaling, uint32_t random) {
          const float z = scaled(W(to_work(x)), scaling);
          Codes::put(e.codes, place, exponential_of(z, rule.powers, kSignBit<Codes>, random));
        });
  });
}

// Eight neighbours of 8 bits at a time, where they are aligned: one number of eight bytes is loaded and written, and
// their random numbers stay in their lane. Calls code_of(k, random) for what they become, in order.
template <class CodeOf>
__device__ void put_eight(uint8_t* out, const Stream& key, int64_t element, const CodeOf& code_of) {
  const EightDraws random = draw_from(key, element);
  uint32_t halves[2] = {};
#pragma unroll
  for (int k = 0; k < kDrawsPerGroup; ++k) halves[k / 4] |= (code_of(k, random[k]) & 0xffu) << (8 * (k % 4));
  *reinterpret_cast<uint64_t*>(out) = uint64_t(halves[1]) << 32 | halves[0];
}
__device__ inline uint64_t load_eight(const uint8_t* codes) { return *reinterpret_cast<const uint64_t*>(codes); }
__device__ inline uint32_t byte_of(uint64_t codes, int k) {
  return uint32_t(k < 4 ? codes : codes >> 32) >> (8 * (k % 4)) & 0xffu;
}

template <class Codes> __device__ uint32_t merged(uint32_t a, uint32_t b, uint32_t random) {
  const uint32_t sign_bit = kSignBit<Codes>;
  const ExponentialPair<uint32_t> pair = exponential_pair(a, b, sign_bit);
  return exponential_merge(a, b, pair, 1u << pair.trials, random, sign_bit);
}

template <class Codes> __global__ void __launch_bounds__(kThreads, 4) merge_kernel(ExponentialMerge m) {
  each_go_of(m.count, [&](const auto& go) {
    if (kBits<Codes> == 8 && go.whole && m.aligned) {
      const int64_t first = go.first + lane_index() * kDrawsPerGroup;
      const uint64_t mine = load_eight(m.into + first), other = load_eight(m.other + first);
      put_eight(m.into + first, m.key, m.offset + first,
                [&](int k, uint32_t random) { return merged<Codes>(byte_of(mine, k), byte_of(other, k), random); });
      return;
    }
    each_drawn(
        m.key, m.offset, go,
        [&](int64_t i, NoRows) { return Two<uint8_t>{Codes::get(m.into, i), Codes::get(m.other, i)}; },
        [&](const Place& place, Two<uint8_t> both, NoRows, uint32_t random) {
          Codes::put(m.into, place, merged<Codes>(both.mine, both.other, random));
        });
  });
}

// Codes of 8 bits: the numbers of all parts are added in their order, and the mean is rounded again.
__device__ inline void fold_eight(const ExponentialFold& f, int64_t first, float share) {
  float sums[kDrawsPerGroup];
  for (float& sum : sums) sum = -0.0f;  // which added to a number is that number
#pragma unroll 4
  for (int64_t part = 0; part < f.part_count; ++part) {
    const uint64_t codes = load_eight(f.parts[part] + first);
#pragma unroll
    for (int k = 0; k < kDrawsPerGroup; ++k) sums[k] += exponential_value(byte_of(codes, k), 0x80, f.powers.headroom);
  }
  put_eight(f.out + first, f.key, f.offset + first,
            [&](int k, uint32_t random) { return exponential_of(sums[k] * share, f.powers, 0x80, random); });
}

__global__ void fold_kernel(ExponentialFold f) {
  const float share = 1.0f / float(f.part_count);
  each_go_of(f.count, [&](const auto& go) {
    if (go.whole && f.aligned) return fold_eight(f, go.first + lane_index() * kDrawsPerGroup, share);
    float sums[kOfLane];
    for (float& sum : sums) sum = -0.0f;
    for (int64_t part = 0; part < f.part_count; ++part) {
      const uint8_t* codes = f.parts[part];
      each_of_go(
          go, [&](int64_t i, NoRows) { return codes[i]; },
          [&](const Place& place, uint8_t code, NoRows) {
            sums[place.k] += exponential_value(code, 0x80, f.powers.headroom);
          });
    }
    each_drawn(
        f.key, f.offset, go, [](int64_t, NoRows) { return Nothing(); },
        [&](const Place& place, Nothing, NoRows, uint32_t random) {
          f.out[place.i] = uint8_t(exponential_of(sums[place.k] * share, f.powers, 0x80, random));
        });
  });
}

bool has_whole_eights(const void* codes) { return reinterpret_cast<uintptr_t>(codes) % sizeof(uint64_t) == 0; }

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void exponential_encode(const ExponentialEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, const Stream* key, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units_of_goes(tensors, tensor_count), [&](const auto& table, int64_t) {
      with_codes(bits, [&](auto codes) {
        start(encode_kernel<decltype(codes), T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table,
              Rule{powers_for(bits, headroom), *key});
      });
    });
  });
}

void exponential_merge(uint8_t* into, const uint8_t* other, int64_t bytes, int bits, const Stream* key, int64_t offset,
                       Launch launch) {
  const int64_t count = bytes * 8 / bits;
  with_codes(bits, [&](auto codes) {
    start(merge_kernel<decltype(codes)>, units_of_goes(count) * kWarp, launch,
          ExponentialMerge{into, other, count, *key, offset, has_whole_eights(into) && has_whole_eights(other)});
  });
}

void exponential_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int32_t headroom,
                      const Stream* key, int64_t offset, uint8_t* out, Launch launch) {
  if (count == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  const ExponentialFold f{
      listed.list(), part_count,
      count,         powers_for(8, headroom),
      *key,          offset,
      out,           has_whole_eights(out) && std::all_of(parts, parts + part_count, has_whole_eights)};
  start(fold_kernel, units_of_goes(count) * kWarp, launch, f);
}

void exponential_decode(const ExponentialDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, double scale, Launch launch) {
  with_codes(bits, [&](auto codes) {
    decode_multiples(tensors, tensor_count, dtype, PowerOf<decltype(codes)>{headroom}, scale, launch);
  });
}

}  // namespace hvc
