// One bit per element: packing, the fused offer, the fused decode.
#include "rules/kept.h"
#include "rules/sign.h"
#include "rows.h"
#include "trees.h"
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

// The sum of each row, the step that it makes, or both.
struct Step {
  double* sums;
  float* steps;
  int64_t count, row_length, ranks;
  float scale;
  __device__ void operator()(int64_t row, const Sum& found) const {
    const double sum = canonical(found.sum);
    if (sums) sums[row] = sum;
    if (steps) steps[row] = step_of(sum, min(row_length, count - row * row_length), ranks, scale);
  }
};

// What differs between the tensors of a bucket, at an offer and in decoding, and what all have in common.
template <class T> struct Offered {
  const T* grad;
  KeptArray<Work<T>> residual;
  const Work<T>* divisor;
  int64_t word_offset;
  uint32_t* halves;  // the bits, 32 at a time: what a warp votes on
  Adding<Sum, Step> adding;
};

template <class T> struct Decoded {
  const uint32_t *halves, *zeros;  // 32 bits at a time
  const float* steps;
  const Work<T>* divisor;
  int64_t count, row_length, word_offset;
  T* grad;
  void* residual;
};

template <class W> struct Rule {
  W decay, scale;
  Coins coins;
  Dtype kept_dtype;
  KeptDraws draws;
};

template <class T> __device__ KeptArray<Work<T>> residual_of(const Decoded<T>& d, const Rule<Work<T>>& rule) {
  return kept_array<Work<T>>(d.residual, rule.kept_dtype, d.word_offset * kWordBits, rule.draws);
}

template <class W> __device__ bool own_bit(W x, const Coins& coins, int64_t word_offset, int64_t i) {
  if (!coins.present || x != 0) return sign_bit(x);
  return random_word(coins.stream, word_offset + i / kWordBits, 0) >> (i % kWordBits) & 1;
}

// ---- kernels ----------------------------------------------------------------------------------------------

// A warp votes on several halves of words, and as many lanes write them.
template <class T> __global__ void pack_kernel(const T* x, int64_t count, uint32_t* halves) {
  const int64_t all = 2 * words_for(count);
  for (int64_t half = first_warp() * kGroups; half < all; half += warp_stride() * kGroups) {
    const int64_t at = half * kWarp + lane_index(), left = count - at;
    T values[kGroups];
#pragma unroll
    for (int k = 0; k < kGroups; ++k) values[k] = k * kWarp < left ? (x + at)[k * kWarp] : T{};
    uint32_t mine = 0;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const uint32_t bits = __ballot_sync(kAllLanes, k * kWarp < left && sign_bit(to_work(values[k])));
      mine = lane_index() == k ? bits : mine;
    }
    if (lane_index() < kGroups && half + lane_index() < all) halves[half + lane_index()] = mine;
  }
}

// What a warp finds of a block of 1024 elements: every lane the bits of its group, those that coins decide apart, and a
// part of the sum.
template <class W> struct OfBlock {
  W sum = 0;
  int bad = 0;
  uint32_t bits = 0, zeros = 0;
};

// Takes the groups of a block from `first` on: lane by lane, as the tree says. Past the end x is 0, and the bit too.
template <bool kWhole, class T> __device__ void take_groups(const Offered<T>& o, bool coins, int64_t begin, int count,
                                                            int first, OfBlock<Work<T>>& found) {
  using W = Work<T>;
  const int64_t at = begin + first * kWarp + lane_index();
  const int left = count - first * kWarp - lane_index();
  T given[kGroups];
  W x[kGroups];
  load_offered<kWhole>(o.grad, o.residual, at, left, given, x);
  if (o.divisor) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k)
      if (kWhole || k * kWarp < left) x[k] += to_work(given[k]) / (o.divisor + at)[k * kWarp];
  } else {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) x[k] += to_work(given[k]);
  }
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    const bool inside = kWhole || k * kWarp < left;
    const uint32_t bits = __ballot_sync(kAllLanes, inside && sign_bit(x[k]));
    const uint32_t zeros = coins ? __ballot_sync(kAllLanes, inside && x[k] == 0) : 0;
    found.bits = lane_index() == first + k ? bits : found.bits;
    found.zeros = lane_index() == first + k ? zeros : found.zeros;
    found.sum += magnitude(x[k]);
    found.bad += !can_be_kept(x[k]);
  }
}

// The coins of 32 elements from i on, as own_bit() takes one.
__device__ inline uint32_t coins_of_group(const Stream& stream, int64_t word_offset, int64_t i) {
  const int64_t word = word_offset + i / kWordBits;
  const int shift = int(i % kWordBits);
  const uint64_t low = random_word(stream, word, 0) >> shift;
  return uint32_t(shift <= kWarp ? low : low | random_word(stream, word + 1, 0) << (kWordBits - shift));
}

// Takes a block, writes its bits, and returns what its |x| come to.
template <class T>
__device__ Sum take_block(const Offered<T>& o, const Coins& coins, int64_t begin, int count, int& bad) {
  OfBlock<Work<T>> found;
  for (int first = 0; first * kWarp < count; first += kGroups) {
    if (count == kBlock)
      take_groups<true>(o, coins.present, begin, count, first, found);
    else
      take_groups<false>(o, coins.present, begin, count, first, found);
  }
  if (found.zeros != 0) {
    const uint32_t flips = coins_of_group(coins.stream, o.word_offset, begin + lane_index() * kWarp);
    found.bits = (found.bits & ~found.zeros) | (flips & found.zeros);
  }
  put_block(o.halves, o.adding.tree, begin, count, found.bits);
  bad += found.bad;
  return {double(combine_warp(found.sum))};
}

// Registers for four blocks on a multiprocessor, of float64 for three.
template <class T, class Table> __global__ void __launch_bounds__(kThreads, sizeof(Work<T>) == 8 ? 3 : 4)
    offer_kernel(const __grid_constant__ Table table, Coins coins, int64_t* nonfinite) {
  each_stretch(table, nonfinite, [&](const Offered<T>& o, int64_t begin, int count, int& bad) {
    return take_block(o, coins, begin, count, bad);
  });
}

template <Feedback kFeedback, class T> __device__ Work<T> left_of(const Decoded<T>& d, const Rule<Work<T>>& rule,
                                                                  Work<T> x, Work<T> result, Work<T> step, int64_t i) {
  using W = Work<T>;
  if (kFeedback == kFeedbackMomentum) return x * rule.decay;
  constexpr bool kOfOthers = kFeedback == kFeedbackGlobal;
  const W value = kOfOthers ? result : signed_step(own_bit(x, rule.coins, d.word_offset, i), step);
  return less_value(x, value, kOfOthers) * rule.decay;
}

// What a warp decodes in one go: `step` is that of all these elements, if they share one.
template <class W> struct Taken {
  int64_t first, last;
  bool shared;
  W step;
};

// The bits of the groups from element `begin` on, and after them those of their zeros: a half of a word for a lane.
template <class T> __device__ uint32_t halves_of_lane(const Decoded<T>& d, int64_t begin, int64_t last) {
  const int lane = lane_index(), group = lane % kInFlight;
  const uint32_t* from = lane < kInFlight ? d.halves : d.zeros;
  return lane < 2 * kInFlight && from && begin + group * kWarp < last ? from[begin / kWarp + group] : 0;
}

// A warp takes several groups of 32 elements.
template <Feedback kFeedback, bool kWhole, class T>
__device__ void decode_groups(const Decoded<T>& d, const Rule<Work<T>>& rule, const Taken<Work<T>>& taken,
                              int64_t begin) {
  using W = Work<T>;
  constexpr bool kKeeps = kFeedback != kFeedbackNone;
  const int64_t at = begin + lane_index();
  const int left = int(min(taken.last - at, int64_t(kInFlight * kWarp)));
  T given[kInFlight]{};
  W kept[kInFlight], by[kInFlight];
  const uint32_t halves = halves_of_lane(d, begin, taken.last);
  const KeptArray<W> residual = residual_of(d, rule);
  if (kKeeps) load_offered<kWhole>(d.grad, residual, at, left, given, kept);
#pragma unroll
  for (int k = 0; k < kInFlight; ++k)
    by[k] = d.divisor && (kWhole || k * kWarp < left) ? (d.divisor + at)[k * kWarp] : W(1);
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const bool bit = __shfl_sync(kAllLanes, halves, k) >> lane_index() & 1;
    const bool zero = __shfl_sync(kAllLanes, halves, kInFlight + k) >> lane_index() & 1;
    if (!kWhole && k * kWarp >= left) continue;
    const int64_t i = at + k * kWarp;
    const W step = taken.shared ? taken.step : W(d.steps[row_of(i, d.row_length, d.count)]);
    if (kKeeps) {
      const W mine = d.divisor ? to_work(given[k]) / by[k] : to_work(given[k]), x = mine + kept[k];
      const W result = signed_step_or_zero(zero, bit, step);
      kept[k] = left_of<kFeedback>(d, rule, x, result, step, i);
    }
    const W decoded = signed_step_or_zero(zero, bit, step * rule.scale);
    (d.grad + at)[k * kWarp] = from_work<T>(d.divisor ? decoded * by[k] : decoded);
  }
  if (kKeeps) put_kept<kWhole>(residual, at, left, kept);
}

template <Feedback kFeedback, class T, class Table>
__global__ void __launch_bounds__(kThreads, sizeof(Work<T>) == 8 ? 3 : 4)
    decode_kernel(const __grid_constant__ Table table, const __grid_constant__ Rule<Work<T>> rule) {
  constexpr int64_t kMost = in_one_go(true), kElements = kInFlight * kWarp;
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Decoded<T>& d = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost, last = min(first + kMost, d.count);
    const int64_t row = row_of(first, d.row_length, d.count);
    const bool shared = row == row_of(last - 1, d.row_length, d.count);
    const Taken<Work<T>> taken{first, last, shared, Work<T>(d.steps[row])};
    for (int64_t begin = first; begin < last; begin += kElements) {
      if (begin + kElements <= last)
        decode_groups<kFeedback, true>(d, rule, taken, begin);
      else
        decode_groups<kFeedback, false>(d, rule, taken, begin);
    }
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

template <class T> Offered<T> offered_of(const SignOffered& t, Dtype kept_dtype, const Adding<Sum, Step>& adding) {
  return {static_cast<const T*>(t.grad),          kept_array<Work<T>>(t.residual, kept_dtype),
          static_cast<const Work<T>*>(t.divisor), t.word_offset,
          reinterpret_cast<uint32_t*>(t.bits),    adding};
}

template <class T> Decoded<T> decoded_of(const SignDecoded& t) {
  return {reinterpret_cast<const uint32_t*>(t.bits),
          reinterpret_cast<const uint32_t*>(t.zeros),
          t.steps,
          static_cast<const Work<T>*>(t.divisor),
          t.count,
          t.row_length,
          t.word_offset,
          static_cast<T*>(t.grad),
          t.residual};
}

// Calls body with a feedback that the compiler knows.
template <class Body> void visit_feedback(Feedback feedback, const Body& body) {
  switch (feedback) {
    case kFeedbackNone:
      return body(std::integral_constant<Feedback, kFeedbackNone>());
    case kFeedbackGlobal:
      return body(std::integral_constant<Feedback, kFeedbackGlobal>());
    case kFeedbackOwn:
      return body(std::integral_constant<Feedback, kFeedbackOwn>());
    case kFeedbackMomentum:
      return body(std::integral_constant<Feedback, kFeedbackMomentum>());
  }
}

}  // namespace

void sign_pack(const void* x, Dtype dtype, int64_t count, uint64_t* bits, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    start(pack_kernel<T>, ceil_div(2 * words_for(count), kGroups) * kWarp, launch, static_cast<const T*>(x), count,
          reinterpret_cast<uint32_t*>(bits));
  });
}

void sign_offer(const SignOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, int64_t ranks,
                float scale, const Stream* key, int64_t* nonfinite, Launch launch) {
  const auto shape = [&](int64_t i) { return std::pair(tensors[i].count, tensors[i].row_length); };
  const auto units = [&](int64_t i) { return groups_in(tensors[i].count, tensors[i].row_length); };
  clear_bits(tensors, tensor_count, launch);
  // An array without elements may have no address.
  const bool adds =
      std::any_of(tensors, tensors + tensor_count, [](const SignOffered& t) { return t.steps || t.sums; });
  const Trees<Sum> trees(tensor_count, shape, adds, launch);
  const auto adding = [&](int64_t i) {
    const SignOffered& t = tensors[i];
    return Adding<Sum, Step>{trees.of(i, t.count, t.row_length),
                             {t.sums, t.steps, t.count, t.row_length, ranks, scale}};
  };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto item = [&](int64_t i) { return offered_of<T>(tensors[i], kept_dtype, adding(i)); };
    in_tables<Offered<T>>(tensor_count, item, units, [&](const auto& table, int64_t first) {
      start_groups(offer_kernel<T, std::decay_t<decltype(table)>>, table.units(), launch, table, Coins(key),
                   nonfinite + first);
    });
  });
  trees.add(tensor_count, adding, launch);
}

void sign_decode(const SignDecoded* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, Feedback feedback,
                 double decay, double scale, const Stream* key, const Stream* rounding, Launch launch) {
  const KeptDraws draws = draws_for(rounding ? *rounding : Stream{});
  const auto units = [&](int64_t i) { return ceil_div(tensors[i].count, in_one_go(true)); };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Rule<Work<T>> rule{Work<T>(decay), Work<T>(scale), Coins(key), kept_dtype, draws};
    const auto item = [&](int64_t i) { return decoded_of<T>(tensors[i]); };
    visit_feedback(feedback, [&](auto kind) {
      in_tables<Decoded<T>>(tensor_count, item, units, [&](const auto& table, int64_t) {
        using Table = std::decay_t<decltype(table)>;
        start(decode_kernel<decltype(kind)::value, T, Table>, table.units() * kWarp, launch, table, rule);
      });
    });
  });
}

}  // namespace hvc
