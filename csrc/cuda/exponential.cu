// Exponential dithering: signs and exponents that merge in a tree.
#include "rules/exponential.h"

#include "dither.h"
#include "multiples.h"
#include "pack.h"
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
  int64_t bytes;
  Stream key;
  int64_t offset;
  bool aligned;  // both, for eight codes at a time
};

struct ExponentialFold {
  PartList<uint8_t> parts;
  int64_t part_count, count;
  PowersOfTwo powers;
  Stream key;
  int64_t offset;
  uint8_t* out;
  bool aligned;  // `out` and the parts
};

template <int kBits> constexpr uint32_t kSignBit = 1u << (kBits - 1);
constexpr int kCodes = 256;  // of 8 bits

template <int kBits, int kMantissa> struct PowerOf {
  int32_t headroom;
  __device__ uint8_t load(const void* codes, int64_t i) const {
    return kBits == 4 ? nibble_at(codes, i) : static_cast<const uint8_t*>(codes)[i];
  }
  __device__ float operator()(uint8_t code, int64_t) const {
    return exponential_value<kMantissa>(code, kSignBit<kBits>, headroom);
  }
};

// Calls run(a constant of so many bits).
template <class Run> void with_bits(int bits, const Run& run) {
  if (bits == 4)
    run(std::integral_constant<int, 4>());
  else
    run(std::integral_constant<int, 8>());
}

// Calls run(constants of so many bits, and of so many in the mantissa).
template <class Run> void with_format(int bits, int32_t mantissa, const Run& run) {
  if (mantissa > 0)
    run(std::integral_constant<int, 8>(), std::integral_constant<int, kMantissaBits>());
  else
    with_bits(bits, [&](auto width) { run(width, std::integral_constant<int, 0>()); });
}

// ---- eight neighbours, a thread's: their random numbers stay where they are drawn --------------------------

// `used` bytes of eight codes; where all of them are there and aligned, they are one number.
template <int kBits, bool kWhole> struct Eight {
  using Number = std::conditional_t<kBits == 4, uint32_t, uint64_t>;
  static constexpr int kPerHalf = 32 / kBits;
  static constexpr uint32_t kCode = 2 * kSignBit<kBits> - 1;
  int64_t first, byte;  // of the codes
  int used;

  __device__ uint64_t load(const uint8_t* codes) const {
    return kWhole ? *reinterpret_cast<const Number*>(codes + byte) : load_bytes_of_group(codes + byte, used);
  }
  static __device__ uint32_t code(uint64_t codes, int k) {
    return uint32_t(k < kPerHalf ? codes : codes >> 32) >> (kBits * (k % kPerHalf)) & kCode;
  }
  // Writes code_of(k, random) of all eight.
  template <class CodeOf> __device__ void put(uint8_t* out, const Stream& key, int64_t offset, CodeOf code_of) const {
    const EightDraws random = draw_from(key, offset + first);
    uint32_t halves[2] = {};
#pragma unroll
    for (int k = 0; k < kPacked; ++k)
      halves[k / kPerHalf] |= (code_of(k, random[k]) & kCode) << (kBits * (k % kPerHalf));
    const uint64_t codes = uint64_t(halves[1]) << 32 | halves[0];
    if constexpr (kWhole) {
      *reinterpret_cast<Number*>(out + byte) = Number(codes);
    } else {
#pragma unroll
      for (int i = 0; i < kBits; ++i)
        if (i < used) (out + byte)[i] = uint8_t(codes >> (8 * i));
    }
  }
};

// Calls body(an Eight) for a thread's part of so many bytes.
template <int kBits, class Body> __device__ void each_eight(int64_t bytes, bool aligned, const Body& body) {
  for (int64_t group = first_item(); group * kBits < bytes; group += item_stride()) {
    const int64_t first = group * kPacked, byte = group * kBits;
    if (aligned && byte + kBits <= bytes)
      body(Eight<kBits, true>{first, byte, kBits});
    else
      body(Eight<kBits, false>{first, byte, int(min(bytes - byte, int64_t(kBits)))});
  }
}

// ---- kernels ----------------------------------------------------------------------------------------------

template <int kBits, int kMantissa, class T, class Table>
__global__ void encode_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule rule) {
  using W = Work<T>;
  const auto of_row = [](const ExponentialEncoded& e, int64_t row) {
    return scaling_for(static_cast<const W*>(e.norms)[row], W(1));
  };
  each_go_of(table, OwnRows(), of_row, [&](const ExponentialEncoded& e, const auto& go) {
    const auto each_code = [&](const auto& use) {
      each_drawn(
          rule.key, e.offset, go, [&](int64_t i, const Scaling<W>&) { return static_cast<const T*>(e.grad)[i]; },
          [&](const Place& place, T x, const Scaling<W>& scaling, uint32_t random) {
            const float z = scaled(W(to_work(x)), scaling);
            use(place, exponential_of<kMantissa>(z, rule.powers, kSignBit<kBits>, random));
          });
    };
    if constexpr (kBits == 8) {
      each_code([&](const Place& place, uint32_t code) { e.codes[place.i] = uint8_t(code); });
    } else {
      uint32_t mine[kOfLane] = {};
      each_code([&](const Place& place, uint32_t code) { mine[place.k] = code; });
      put_packed(mine, Packing(kBits), e.codes + go.first / kPacked * kBits,
                 int(packed_bytes(min(e.count - go.first, kOfWarp), kBits)));
    }
  });
}

template <int kBits> __global__ void merge_kernel(ExponentialMerge m) {
  constexpr uint32_t kSign = kSignBit<kBits>;
  each_eight<kBits>(m.bytes, m.aligned, [&](const auto& eight) {
    const uint64_t mine = eight.load(m.into), other = eight.load(m.other);
    eight.put(m.into, m.key, m.offset, [&](int k, uint32_t random) {
      const uint32_t a = eight.code(mine, k), b = eight.code(other, k);
      const ExponentialPair<uint32_t> pair = exponential_pair(a, b, kSign);
      return exponential_merge(a, b, pair, 1u << pair.trials, random, kSign);
    });
  });
}

// Codes of 8 bits: the numbers of all parts are added in their order, and the mean is rounded again. What a code
// stands for is looked up in shared memory, which takes a third of the instructions.
template <int kMantissa> __global__ void fold_kernel(ExponentialFold f) {
  static_assert(kCodes == kThreads, "a thread makes one number");
  __shared__ float of_codes[kCodes];
  float* const values = of_codes;
  values[threadIdx.x] = exponential_value<kMantissa>(threadIdx.x, kSignBit<8>, f.powers.headroom);
  __syncthreads();
  const float share = 1.0f / float(f.part_count);
  each_eight<8>(f.count, f.aligned, [&](const auto& eight) {
    float sums[kPacked];
    for (float& sum : sums) sum = -0.0f;  // which added to a number is that number
#pragma unroll 4
    for (int64_t part = 0; part < f.part_count; ++part) {
      const uint64_t codes = eight.load(f.parts[part]);
#pragma unroll
      for (int k = 0; k < kPacked; ++k) sums[k] += values[eight.code(codes, k)];
    }
    eight.put(f.out, f.key, f.offset, [&](int k, uint32_t random) {
      return exponential_of<kMantissa>(sums[k] * share, f.powers, kSignBit<8>, random);
    });
  });
}

// Whether eight codes of so many bits, from there on, are an aligned number.
bool has_whole_eights(const void* codes, int bits = 8) { return reinterpret_cast<uintptr_t>(codes) % bits == 0; }

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void exponential_encode(const ExponentialEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, int32_t mantissa, const Stream* key, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units_of_goes(tensors, tensor_count), [&](const auto& table, int64_t) {
      with_format(bits, mantissa, [&](auto width, auto kept) {
        start(encode_kernel<width(), kept(), T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table,
              Rule{powers_for(bits, headroom, mantissa), *key});
      });
    });
  });
}

void exponential_merge(uint8_t* into, const uint8_t* other, int64_t bytes, int bits, const Stream* key, int64_t offset,
                       Launch launch) {
  const bool aligned = has_whole_eights(into, bits) && has_whole_eights(other, bits);
  with_bits(bits, [&](auto width) {
    start(merge_kernel<width()>, ceil_div(bytes, width()), launch,
          ExponentialMerge{into, other, bytes, *key, offset, aligned});
  });
}

void exponential_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int32_t headroom,
                      int32_t mantissa, const Stream* key, int64_t offset, uint8_t* out, Launch launch) {
  if (count == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  const bool aligned = has_whole_eights(out) && std::all_of(parts, parts + part_count,
                                                            [](const uint8_t* part) { return has_whole_eights(part); });
  start(
      mantissa > 0 ? fold_kernel<kMantissaBits> : fold_kernel<0>, ceil_div(count, int64_t(kPacked)), launch,
      ExponentialFold{listed.list(), part_count, count, powers_for(8, headroom, mantissa), *key, offset, out, aligned});
}

void exponential_decode(const ExponentialDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, int32_t mantissa, double scale, Launch launch) {
  with_format(bits, mantissa, [&](auto width, auto kept) {
    decode_multiples(tensors, tensor_count, dtype, PowerOf<width(), kept()>{headroom}, scale, launch);
  });
}

}  // namespace hvc
