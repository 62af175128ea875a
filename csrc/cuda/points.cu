// Signs with two values per row: the fused offer, and the fused decode of all ranks.
#include "hvc/kept.h"
#include "hvc/sign.h"
#include "launch.h"
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
  const uint64_t* const* bits;
  const float* const* highs;
  const float* const* lows;  // or none
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
    for (int64_t group = begin; group < end; group += kWarp) {
      const int64_t i = group + lane_index();
      const W x = i < end ? offered(o.grad, o.residual, i) : W(0);
      const bool bit = i < end && sign_bit(x);
      const uint32_t bits = __ballot_sync(kAllLanes, bit);
      if (lane_index() == 0) put_bits(o.halves, group, bits, o.whole_halves);
      high += bit ? magnitude(x) : W(0);
      low += bit ? W(0) : magnitude(x);
      ones += __popc(bits);
      nonfinite += !can_be_kept(x);
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
  return bit ? high : d.lows ? W(d.lows[rank][row]) : -high;
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

// From pageable memory: CUDA has taken its own copy of the list when this returns.
template <class P> void copy_list(const P* from, int64_t count, P* into, Launch launch) {
  check(cudaMemcpyAsync(into, from, size_t(count) * sizeof(P),
                        cudaMemcpyHostToDevice, stream_of(launch)),
        "cudaMemcpyAsync");
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
  const Scratch<const uint64_t*> bits_at(ranks, launch);
  const Scratch<const float*> highs_at(ranks, launch), lows_at(lows ? ranks : 0, launch);
  copy_list(bits, ranks, bits_at.get(), launch);
  copy_list(highs, ranks, highs_at.get(), launch);
  if (lows) copy_list(lows, ranks, lows_at.get(), launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const PointsDecode<T> decode{bits_at.get(), highs_at.get(), lows_at.get(), ranks, own, count, row_length, scale,
                                 static_cast<T*>(grad), static_cast<Work<T>*>(residual)};
    start(points_decode_kernel<T>, count, launch, decode);
  });
}

}  // namespace hvc
