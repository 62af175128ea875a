// Signs with two values per row: the fused offer, and the fused decode of all ranks.
#include "hvc/kept.h"
#include "hvc/sign.h"
#include "parts.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct PointsOffer {
  const T* grad;
  const Work<T>* residual;
  int64_t count, row_length;
  uint32_t* halves;  // the bits, 32 at a time: what a warp votes on
  bool whole_halves;
  double *block_highs, *block_lows;
  int64_t *ones, *nonfinite;
};

template <class T> struct PointsDecode {
  PartList<uint64_t> bits;
  PartList<float> highs, lows;
  bool has_lows;
  int64_t ranks, own, count, row_length;
  double scale;
  T* grad;
  Work<T>* residual;
};

// ---- kernels ----------------------------------------------------------------------------------------------

// A warp sums both sides of a block of 1024 elements, lane by lane, as the tree says.
template <class T> __global__ void points_offer_kernel(PointsOffer<T> o) {
  using W = Work<T>;
  const Blocks blocks = blocks_of(o.count, o.row_length);
  int64_t nonfinite = 0;
  for (int64_t block = first_warp(); block < blocks.total; block += warp_stride()) {
    const int64_t index = block / blocks.per_row, row = index * o.row_length;
    const int64_t row_end = row + o.row_length < o.count ? row + o.row_length : o.count;
    const int64_t begin = row + block % blocks.per_row * kBlock;
    const int64_t end = begin + kBlock < row_end ? begin + kBlock : row_end;
    W high = 0, low = 0;
    int64_t ones = 0;
    for (int64_t groups = begin; groups < end; groups += kInFlight * kWarp) {
      const Loaded<T> loaded = load_groups(o.grad, o.residual, groups, end);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t group = groups + k * kWarp;
        if (group >= end) break;
        const W x = loaded.x[k];
        const bool bit = group + lane_index() < end && sign_bit(x);
        const uint32_t bits = __ballot_sync(kAllLanes, bit);
        if (lane_index() == 0) put_bits(o.halves, group, bits, o.whole_halves);
        high += bit ? magnitude(x) : W(0);
        low += bit ? W(0) : magnitude(x);
        ones += __popc(bits);
        nonfinite += !can_be_kept(x);
      }
    }
    high = combine_warp(high);
    low = combine_warp(low);
    if (lane_index() != 0) continue;
    o.block_highs[block] = double(high);
    o.block_lows[block] = double(low);
    add_count(o.ones + index, ones);
  }
  add_count(o.nonfinite, nonfinite);
}

template <class T> __device__ Work<T> sent(const PointsDecode<T>& d, int64_t rank, int64_t row, int64_t i) {
  using W = Work<T>;
  const W high = d.highs[rank][row];
  const bool bit = d.bits[rank][i / kWordBits] >> (i % kWordBits) & 1;
  return bit ? high : d.has_lows ? W(d.lows[rank][row]) : -high;
}

template <class T> __global__ void points_decode_kernel(PointsDecode<T> d) {
  using W = Work<T>;
  for (int64_t i = first_item(); i < d.count; i += item_stride()) {
    const int64_t row = row_of(i, d.row_length, d.count);
    d.residual[i] = offered(d.grad, d.residual, i) - sent(d, d.own, row, i);
    W total = sent(d, 0, row, i);
    for (int64_t rank = 1; rank < d.ranks; ++rank) total += sent(d, rank, row, i);
    d.grad[i] = from_work<T>(total * W(d.scale));
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void points_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t row_length,
                  uint64_t* bits, double* highs, double* lows, int64_t* ones, int64_t* nonfinite, Launch launch) {
  const Units units = units_of(count, row_length);
  const int64_t blocks = blocks_of(count, row_length).total, rows = ceil_div(count, row_length);
  clear(nonfinite, sizeof *nonfinite, launch);
  clear(bits, words_for(count) * int64_t(sizeof *bits), launch);
  clear(ones, rows * int64_t(sizeof *ones), launch);
  const Scratch<double> block_highs(blocks, launch), block_lows(blocks, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PointsOffer<T> offer{static_cast<const T*>(grad),
                               static_cast<const Work<T>*>(residual),
                               count,
                               row_length,
                               reinterpret_cast<uint32_t*>(bits),
                               row_length % kWarp == 0 || row_length >= count,
                               block_highs.get(),
                               block_lows.get(),
                               ones,
                               nonfinite};
    start(points_offer_kernel<T>, blocks * kWarp, launch, offer);
  });
  add_blocks(units, block_highs.get(), highs, launch);
  add_blocks(units, block_lows.get(), lows, launch);
}

void points_decode(const uint64_t* const* bits, const float* const* highs, const float* const* lows, int64_t ranks,
                   int64_t own, Dtype dtype, int64_t count, int64_t row_length, double scale, void* grad,
                   void* residual, Launch launch) {
  if (count == 0) return;
  const Parts<uint64_t> bits_at(bits, ranks, launch);
  const Parts<float> highs_at(highs, ranks, launch), lows_at(lows, lows ? ranks : 0, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PointsDecode<T> decode{bits_at.list(), highs_at.list(), lows_at.list(), lows != nullptr, ranks, own, count,
                                 row_length, scale, static_cast<T*>(grad), static_cast<Work<T>*>(residual)};
    start(points_decode_kernel<T>, count, launch, decode);
  });
}

}  // namespace hvc
