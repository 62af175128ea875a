// One bit per element: packing, the fused offer, the fused decode.
#include "hvc/kept.h"
#include "hvc/tree.h"
#include "launch.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- helpers ----------------------------------------------------------------------------------------------

// A key that may be absent, passed by value.
struct Coins {
  explicit Coins(const Stream* key, int64_t word_offset)
      : present(key != nullptr), stream(key ? *key : Stream{}), word_offset(word_offset) {}
  bool present;
  Stream stream;
  int64_t word_offset;
};

template <class T> struct Offer {
  const T* grad;
  const Work<T>* residual;
  int64_t count, row_length;
  Coins coins;
  uint32_t* halves;  // the bits, 32 at a time: what a warp votes on
  bool whole_halves;
  double* block_sums;
  int64_t* nonfinite;
};

template <class T> struct Decode {
  const uint64_t* bits;
  const float* steps;
  int64_t count, row_length;
  Feedback feedback;
  double decay, scale;
  Coins coins;
  T* grad;
  Work<T>* residual;
};

template <class W> __device__ bool own_bit(W x, const Coins& coins, int64_t i) {
  if (!coins.present || x != 0) return sign_bit(x);
  return random_word(coins.stream, coins.word_offset + i / kWordBits, 0) >> (i % kWordBits) & 1;
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
template <class T> __global__ void offer_kernel(Offer<T> o) {
  const Blocks blocks = blocks_of(o.count, o.row_length);
  int64_t nonfinite = 0;
  for (int64_t block = first_warp(); block < blocks.total; block += warp_stride()) {
    const int64_t row = block / blocks.per_row * o.row_length;
    const int64_t row_end = row + o.row_length < o.count ? row + o.row_length : o.count;
    const int64_t begin = row + block % blocks.per_row * kBlock;
    const int64_t end = begin + kBlock < row_end ? begin + kBlock : row_end;
    Work<T> sum = 0;
    for (int64_t groups = begin; groups < end; groups += kInFlight * kWarp) {
      const Loaded<T> loaded = load_groups(o.grad, o.residual, groups, end);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t group = groups + k * kWarp, i = group + lane_index();
        if (group >= end) break;
        const Work<T> x = loaded.x[k];
        const uint32_t bits = __ballot_sync(kAllLanes, i < end && own_bit(x, o.coins, i));
        if (lane_index() == 0) put_bits(o.halves, group, bits, o.whole_halves);
        sum += magnitude(x);
        nonfinite += !can_be_kept(x);
      }
    }
    sum = combine_warp(sum);
    if (o.block_sums && lane_index() == 0) o.block_sums[block] = double(sum);
  }
  add_count(o.nonfinite, nonfinite);
}

template <class T> __device__ Work<T> left_of(const Decode<T>& d, Work<T> x, bool bit, Work<T> step, int64_t i) {
  using W = Work<T>;
  W left = x;
  if (d.feedback != kFeedbackMomentum) {
    const bool kept = d.feedback == kFeedbackGlobal ? bit : own_bit(x, d.coins, i);
    left = x - signed_step(kept, step);
    if (d.feedback == kFeedbackGlobal) left = cut_off(left, most_left<W>);  // others' signs may add to it
  }
  return left * W(d.decay);
}

// A warp takes several halves of words, each read by all its lanes at once.
template <class T> __global__ void decode_kernel(Decode<T> d) {
  using W = Work<T>;
  constexpr int64_t kElements = kInFlight * kWarp;
  const auto* halves = reinterpret_cast<const uint32_t*>(d.bits);
  const bool keeps = d.feedback != kFeedbackNone;
  for (int64_t begin = first_warp() * kElements; begin < d.count; begin += warp_stride() * kElements) {
    const Loaded<T> loaded = load_groups<T>(d.grad, d.residual, begin, keeps ? d.count : begin);
    uint32_t bits[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) bits[k] = begin + k * kWarp < d.count ? halves[begin / kWarp + k] : 0;
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = begin + k * kWarp + lane_index();
      if (i >= d.count) break;
      const bool bit = bits[k] >> lane_index() & 1;
      const W step = d.steps[row_of(i, d.row_length, d.count)];
      if (keeps) d.residual[i] = left_of(d, loaded.x[k], bit, step, i);
      d.grad[i] = from_work<T>(signed_step(bit, step * W(d.scale)));
    }
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

template <class T> void run_offer(Offer<T> offer, double* sums, Launch launch) {
  const Units units = units_of(offer.count, offer.row_length);
  const int64_t blocks = blocks_of(offer.count, offer.row_length).total;
  const Scratch<double> block_sums(sums ? blocks : 0, launch);
  offer.block_sums = block_sums.get();
  start(offer_kernel<T>, blocks * kWarp, launch, offer);
  if (sums) add_blocks(units, block_sums.get(), sums, launch);
}

}  // namespace

void sign_pack(const void* x, Dtype dtype, int64_t count, uint64_t* bits, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    start(pack_kernel<T>, ceil_div(2 * words_for(count), kInFlight) * kWarp, launch, static_cast<const T*>(x), count,
          reinterpret_cast<uint32_t*>(bits));
  });
}

void sign_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t row_length,
                const Stream* key, int64_t word_offset, uint64_t* bits, double* sums, int64_t* nonfinite,
                Launch launch) {
  clear(nonfinite, sizeof *nonfinite, launch);
  clear(bits, words_for(count) * int64_t(sizeof *bits), launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool whole_halves = row_length % kWarp == 0 || row_length >= count;
    const Offer<T> offer{static_cast<const T*>(grad),
                         static_cast<const Work<T>*>(residual),
                         count,
                         row_length,
                         Coins(key, word_offset),
                         reinterpret_cast<uint32_t*>(bits),
                         whole_halves,
                         nullptr,
                         nonfinite};
    run_offer(offer, sums, launch);
  });
}

void sign_decode(const uint64_t* bits, const float* steps, Dtype dtype, int64_t count, int64_t row_length,
                 Feedback feedback, double decay, double scale, const Stream* key, int64_t word_offset, void* grad,
                 void* residual, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Coins coins(key, word_offset);
    const Decode<T> decode{bits,
                           steps,
                           count,
                           row_length,
                           feedback,
                           decay,
                           scale,
                           coins,
                           static_cast<T*>(grad),
                           static_cast<Work<T>*>(residual)};
    start(decode_kernel<T>, ceil_div(count, kInFlight), launch, decode);
  });
}

void sign_unpack(const uint64_t* bits, const float* steps, Dtype dtype, int64_t count, int64_t row_length,
                 double scale, void* out, Launch launch) {
  sign_decode(bits, steps, dtype, count, row_length, kFeedbackNone, 1, scale, nullptr, 0, out, nullptr, launch);
}

}  // namespace hvc
