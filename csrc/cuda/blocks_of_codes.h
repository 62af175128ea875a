// A block of QSGD in a warp: its norm, and its codes, eight to a lane.
#pragma once
#include "dither.h"
#include "rules/golomb.h"
#include "rules/qsgd.h"
#include "rules/tree.h"

namespace hvc {
namespace {

// What is to be known of value(0) to value(count - 1), in the order of rules/tree.h; every lane gets it. Not finite
// counts as 0.
struct Moments {
  double largest, squares;
};

template <class Value> __device__ Moments moments_of(int64_t count, const Value& value) {
  double largest = 0, squares = 0;
  for (int64_t block = 0; block < count; block += kBlock) {
    double sum = 0;
    for (int64_t i = block + lane_index(); i < min(block + kBlock, count); i += kWarp) {
      const auto x = value(i);
      const double size = !is_finite(x) ? 0.0 : x < 0 ? -double(x) : double(x);
      largest = max(largest, size);
      sum += size * size;
    }
    for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_down_sync(kAllLanes, sum, half);
    squares += __shfl_sync(kAllLanes, sum, 0);
  }
  for (int half = kWarp / 2; half > 0; half /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, half));
  return {largest, squares};
}

template <class Value> __device__ float norm_of(Power power, int64_t count, const Value& value) {
  const Moments found = moments_of(count, value);
  return power == kMaximum ? norm_at_least(found.largest) : norm_from_squares(found.squares, found.largest);
}

__device__ inline void put_norm(uint8_t* into, float norm) {
  if (lane_index() == 0) store_bytes(into, bit_cast<uint32_t>(norm));
}

// Calls put(first, eight codes, a byte each) for value(0) to value(count - 1), with codes 0 up to the end of the block.
template <class W, class Value, class Put>
__device__ void each_eight_codes(const QsgdShape& shape, int64_t count, float norm, const Stream& key, int64_t offset,
                                 const Value& value, const Put& put) {
  const float limit = level_limit(levels_of(shape.bits));
  const Scaling<W> scaling = scaling_for(W(norm), W(limit));
  for (int64_t first = lane_index() * kPacked; first < shape.block; first += kWarp * kPacked) {
    const EightDraws random = draw_from(key, offset + first);
    uint64_t bytes = 0;
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      if (first + i >= count) continue;
      const int32_t code = level_of(scaled(W(value(first + i)), scaling), limit, random[i]);
      bytes |= uint64_t(uint8_t(code)) << (8 * i);
    }
    put(first, bytes);
  }
}

}  // namespace
}  // namespace hvc
