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
};

struct ExponentialFold {
  PartList<uint8_t> parts;
  int64_t part_count, count;
  PowersOfTwo powers;
  Stream key;
  int64_t offset;
  uint8_t* out;
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

template <class Codes> __global__ void merge_kernel(ExponentialMerge m) {
  each_go_of(m.count, [&](const auto& go) {
    each_drawn(
        m.key, m.offset, go,
        [&](int64_t i, NoRows) { return Two<uint8_t>{Codes::get(m.into, i), Codes::get(m.other, i)}; },
        [&](const Place& place, Two<uint8_t> both, NoRows, uint32_t random) {
          const uint32_t a = both.mine, b = both.other, sign_bit = kSignBit<Codes>;
          const ExponentialPair<uint32_t> pair = exponential_pair(a, b, sign_bit);
          Codes::put(m.into, place, exponential_merge(a, b, pair, 1u << pair.trials, random, sign_bit));
        });
  });
}

// Codes of 8 bits: the numbers of all parts are added in their order, and the mean is rounded again.
__global__ void fold_kernel(ExponentialFold f) {
  const float share = 1.0f / float(f.part_count);
  each_go_of(f.count, [&](const auto& go) {
    float sums[kOfLane];
    for (float& sum : sums) sum = -0.0f;  // which added to a number is that number
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
          ExponentialMerge{into, other, count, *key, offset});
  });
}

void exponential_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int32_t headroom,
                      const Stream* key, int64_t offset, uint8_t* out, Launch launch) {
  if (count == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  const ExponentialFold f{listed.list(), part_count, count, powers_for(8, headroom), *key, offset, out};
  start(fold_kernel, units_of_goes(count) * kWarp, launch, f);
}

void exponential_decode(const ExponentialDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, double scale, Launch launch) {
  with_codes(bits, [&](auto codes) {
    decode_multiples(tensors, tensor_count, dtype, PowerOf<decltype(codes)>{headroom}, scale, launch);
  });
}

}  // namespace hvc
