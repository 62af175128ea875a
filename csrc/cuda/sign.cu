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

template <class T> __global__ void pack_kernel(const T* x, int64_t count, uint32_t* halves) {
  for (int64_t half = first_warp(); half < 2 * words_for(count); half += warp_stride()) {
    const int64_t i = half * kWarp + lane_index();
    const uint32_t bits = __ballot_sync(kAllLanes, i < count && sign_bit(to_work(x[i])));
    if (lane_index() == 0) halves[half] = bits;
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
    for (int64_t group = begin; group < end; group += kWarp) {
      const int64_t i = group + lane_index();
      const Work<T> x = i < end ? offered(o.grad, o.residual, i) : Work<T>(0);
      const uint32_t bits = __ballot_sync(kAllLanes, i < end && own_bit(x, o.coins, i));
      if (lane_index() == 0) put_bits(o.halves, group, bits, o.whole_halves);
      sum += magnitude(x);
      nonfinite += !can_be_kept(x);
    }
    sum = combine_warp(sum);
    if (o.block_sums && lane_index() == 0) o.block_sums[block] = double(sum);
  }
  add_count(o.nonfinite, nonfinite);
}

template <class T> __global__ void decode_kernel(Decode<T> d) {
  using W = Work<T>;
  for (int64_t i = first_item(); i < d.count; i += item_stride()) {
    const bool bit = d.bits[i / kWordBits] >> (i % kWordBits) & 1;
    const W step = d.steps[row_of(i, d.row_length, d.count)];
    if (d.feedback != kFeedbackNone) {
      const W x = offered(d.grad, d.residual, i);
      W left = x;
      if (d.feedback != kFeedbackMomentum) {
        const bool kept = d.feedback == kFeedbackGlobal ? bit : own_bit(x, d.coins, i);
        left = x - signed_step(kept, step);
        if (d.feedback == kFeedbackGlobal) left = cut_off(left, most_left<W>);  // others' signs may add to it
      }
      d.residual[i] = left * W(d.decay);
    }
    d.grad[i] = from_work<T>(signed_step(bit, step * W(d.scale)));
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
    start(pack_kernel<T>, 2 * words_for(count) * kWarp, launch, static_cast<const T*>(x), count,
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
    start(decode_kernel<T>, count, launch, decode);
  });
}

void sign_unpack(const uint64_t* bits, const float* steps, Dtype dtype, int64_t count, int64_t row_length,
                 double scale, void* out, Launch launch) {
  sign_decode(bits, steps, dtype, count, row_length, kFeedbackNone, 1, scale, nullptr, 0, out, nullptr, launch);
}

}  // namespace hvc
