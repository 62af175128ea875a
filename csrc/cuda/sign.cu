// One bit per element: packing, the fused offer, the fused decode.
#include "rules/kept.h"
#include "rules/tree.h"
#include "launch.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- helpers ----------------------------------------------------------------------------------------------

// A key that may be absent, passed by value.
struct Coins {
  explicit Coins(const Stream* key) : present(key != nullptr), stream(key ? *key : Stream{}) {}
  bool present;
  Stream stream;
};

// What differs between the tensors of a bucket, at an offer and in decoding, and what all have in common.
template <class T> struct Offered {
  const T* grad;
  const Work<T>*residual, *divisor;
  int64_t count, row_length, word_offset;
  uint32_t* halves;  // the bits, 32 at a time: what a warp votes on
};

template <class T> struct Decoded {
  const uint32_t *halves, *zeros;  // 32 bits at a time
  const float* steps;
  const Work<T>* divisor;
  int64_t count, row_length, word_offset;
  T* grad;
  Work<T>* residual;
};

struct Rule {
  Feedback feedback;
  double decay, scale;
  Coins coins;
};

template <class W> __device__ bool own_bit(W x, const Coins& coins, int64_t word_offset, int64_t i) {
  if (!coins.present || x != 0) return sign_bit(x);
  return random_word(coins.stream, word_offset + i / kWordBits, 0) >> (i % kWordBits) & 1;
}

// ---- kernels ----------------------------------------------------------------------------------------------

// A warp votes on several halves of words, and as many lanes write them.
template <class T> __global__ void pack_kernel(const T* x, int64_t count, uint32_t* halves) {
  const int64_t all = 2 * words_for(count);
  for (int64_t half = first_warp() * kInFlight; half < all; half += warp_stride() * kInFlight) {
    const Loaded<T> loaded = load_groups<T>(x, nullptr, half * kWarp, count);
    uint32_t mine = 0;
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = (half + k) * kWarp + lane_index();
      const uint32_t bits = __ballot_sync(kAllLanes, i < count && sign_bit(loaded.x[k]));
      mine = lane_index() == k ? bits : mine;
    }
    if (lane_index() < kInFlight && half + lane_index() < all) halves[half + lane_index()] = mine;
  }
}

// A warp sums a block of 1024 elements, lane by lane, as the tree says.
template <class T, class Table>
__global__ void offer_kernel(const __grid_constant__ Table table, Coins coins, double* block_sums, int64_t* nonfinite) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Offered<T>& o = table.items[item];
    const auto [row, begin, end] = block_of_row(unit - table.begins[item], o.count, o.row_length);
    const bool whole_halves = has_whole_halves(o.count, o.row_length);
    Work<T> sum = 0;
    int64_t bad = 0;
    for (int64_t groups = begin; groups < end; groups += kInFlight * kWarp) {
      const Loaded<T> loaded = load_groups(o.grad, o.residual, groups, end, o.divisor);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t group = groups + k * kWarp, i = group + lane_index();
        if (group >= end) break;
        const Work<T> x = loaded.x[k];
        const uint32_t bits = __ballot_sync(kAllLanes, i < end && own_bit(x, coins, o.word_offset, i));
        if (lane_index() == 0) put_bits(o.halves, group, bits, whole_halves);
        sum += magnitude(x);
        bad += !can_be_kept(x);
      }
    }
    sum = combine_warp(sum);
    if (block_sums && lane_index() == 0) block_sums[unit] = double(sum);
    add_count(nonfinite + item, bad);
  }
}

// The sum of each row, the step that it makes, or both.
struct Step {
  double* sums;
  float* steps;
  int64_t count, row_length, ranks;
  __device__ void operator()(int64_t row, double sum) const {
    if (sums) sums[row] = sum;
    if (steps) steps[row] = step_of(sum, min(row_length, count - row * row_length), ranks);
  }
};

template <class T>
__device__ Work<T> left_of(const Decoded<T>& d, const Rule& rule, Work<T> x, Work<T> result, Work<T> step, int64_t i) {
  using W = Work<T>;
  const bool of_others = rule.feedback == kFeedbackGlobal;
  if (rule.feedback == kFeedbackMomentum) return x * W(rule.decay);
  const W value = of_others ? result : signed_step(own_bit(x, rule.coins, d.word_offset, i), step);
  return less_value(x, value, of_others) * W(rule.decay);
}

// A warp takes several halves of words, each read by all its lanes at once.
template <class T, class Table> __global__ void decode_kernel(const __grid_constant__ Table table, Rule rule) {
  using W = Work<T>;
  constexpr int64_t kElements = kInFlight * kWarp, kMost = in_one_go(Table::room > 1);
  const bool keeps = rule.feedback != kFeedbackNone;
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Decoded<T>& d = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost, last = min(first + kMost, d.count);
    for (int64_t begin = first; begin < last; begin += kElements) {
      const Loaded<T> loaded = load_groups<T>(d.grad, d.residual, begin, keeps ? last : begin, d.divisor);
      uint32_t bits[kInFlight], zeros[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const bool inside = begin + k * kWarp < last;
        bits[k] = inside ? d.halves[begin / kWarp + k] : 0;
        zeros[k] = inside && d.zeros ? d.zeros[begin / kWarp + k] : 0;
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t i = begin + k * kWarp + lane_index();
        if (i >= last) break;
        const bool bit = bits[k] >> lane_index() & 1, zero = zeros[k] >> lane_index() & 1;
        const W step = d.steps[row_of(i, d.row_length, d.count)];
        if (keeps) d.residual[i] = left_of(d, rule, loaded.x[k], signed_step_or_zero(zero, bit, step), step, i);
        const W decoded = signed_step_or_zero(zero, bit, step * W(rule.scale));
        d.grad[i] = from_work<T>(d.divisor ? decoded * d.divisor[i] : decoded);
      }
      if (kMost == kElements) break;  // told to the compiler, which would keep registers for another round
    }
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

// Writes bits and counts of all tensors, and the sums of their blocks where somebody wants them.
template <class T> void run_offer(const SignOffered* tensors, int64_t tensor_count, const Stream* key,
                                  double* block_sums, const std::vector<int64_t>& first_block, int64_t* nonfinite,
                                  Launch launch) {
  const auto words = [&](int64_t i) { return words_for(tensors[i].count) * int64_t(sizeof(uint64_t)); };
  clear_counts(nonfinite, tensor_count, launch);
  clear_all(tensor_count, [&](int64_t i) { return tensors[i].bits; }, words, launch);
  const auto item = [&](int64_t i) {
    const SignOffered& t = tensors[i];
    return Offered<T>{static_cast<const T*>(t.grad),
                      static_cast<const Work<T>*>(t.residual),
                      static_cast<const Work<T>*>(t.divisor),
                      t.count,
                      t.row_length,
                      t.word_offset,
                      reinterpret_cast<uint32_t*>(t.bits)};
  };
  const auto blocks = [&](int64_t i) { return first_block[size_t(i) + 1] - first_block[size_t(i)]; };
  in_tables<Offered<T>>(tensor_count, item, blocks, [&](const auto& table, int64_t first) {
    double* sums = block_sums ? block_sums + first_block[size_t(first)] : nullptr;
    start(offer_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, Coins(key), sums,
          nonfinite + first);
  });
}

}  // namespace

void sign_pack(const void* x, Dtype dtype, int64_t count, uint64_t* bits, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    start(pack_kernel<T>, ceil_div(2 * words_for(count), kInFlight) * kWarp, launch, static_cast<const T*>(x), count,
          reinterpret_cast<uint32_t*>(bits));
  });
}

void sign_offer(const SignOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t ranks, const Stream* key,
                int64_t* nonfinite, Launch launch) {
  const auto units = [&](int64_t i) { return units_of(tensors[i].count, tensors[i].row_length); };
  std::vector<int64_t> first_block(size_t(tensor_count) + 1);
  for (int64_t i = 0; i < tensor_count; ++i)
    first_block[size_t(i) + 1] = first_block[size_t(i)] + blocks_of(tensors[i].count, tensors[i].row_length).total;
  // An array without elements may have no address.
  const bool adds =
      std::any_of(tensors, tensors + tensor_count, [](const SignOffered& t) { return t.steps || t.sums; });
  const Scratch<double> block_sums(adds ? first_block.back() : 0, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    run_offer<T>(tensors, tensor_count, key, block_sums.get(), first_block, nonfinite, launch);
  });
  if (!adds) return;
  add_blocks<false, Step>(
      tensor_count, units, block_sums.get(), [&](int64_t i) { return first_block[size_t(i)]; },
      [&](int64_t i) {
        const SignOffered& t = tensors[i];
        return Step{t.sums, t.steps, t.count, t.row_length, ranks};
      },
      launch);
}

void sign_decode(const SignDecoded* tensors, int64_t tensor_count, Dtype dtype, Feedback feedback, double decay,
                 double scale, const Stream* key, Launch launch) {
  const Rule rule{feedback, decay, scale, Coins(key)};
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto item = [&](int64_t i) {
      const SignDecoded& t = tensors[i];
      return Decoded<T>{reinterpret_cast<const uint32_t*>(t.bits),
                        reinterpret_cast<const uint32_t*>(t.zeros),
                        t.steps,
                        static_cast<const Work<T>*>(t.divisor),
                        t.count,
                        t.row_length,
                        t.word_offset,
                        static_cast<T*>(t.grad),
                        static_cast<Work<T>*>(t.residual)};
    };
    in_tables<Decoded<T>>(tensor_count, item, units_in_one_go(tensors, tensor_count), [&](const auto& table, int64_t) {
      start(decode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, rule);
    });
  });
}

}  // namespace hvc
