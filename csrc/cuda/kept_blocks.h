// Blocks of QSGD of which a warp keeps the values: those of a gradient, or of a sum.
#pragma once
#include "blocks_of_codes.h"
#include "pack.h"
#include "parts.h"

namespace hvc {
namespace {

__device__ inline float norm_at(const uint8_t* record) { return bit_cast<float>(load_bytes<uint32_t>(record)); }

// The values of a block that a warp keeps: all of them where it is not longer than this.
constexpr int kGoes = 2;
constexpr int kKept = kGoes * int(kOfWarp);
template <class W> struct Kept {
  W x[kGoes][kOfLane];  // 0 behind the end
};

// Calls body(g, k) for the values of a lane, those of a go of a warp after those of the one before.
template <class Body> __device__ void each_kept(const Body& body) {
#pragma unroll
  for (int j = 0; j < kGoes * kOfLane; ++j) body(j / kOfLane, j % kOfLane);
}
__device__ inline int kept_at(int g, int k) { return g * int(kOfWarp) + k * kWarp; }  // from the lane's first on

// Calls body(number of a go, its first element) for those of kKept elements from `first` on that begin before `end`.
template <class Body> __device__ void each_kept_go(int first, int end, const Body& body) {
#pragma unroll
  for (int g = 0; g < kGoes; ++g)
    if (first + g * int(kOfWarp) < end) body(g, first + g * int(kOfWarp));
}

// The norm of the values of a block, as norm_of finds it, and how many of a lane's are not finite. `fetch(first)` is
// what a warp keeps from there on.
struct Measured {
  float norm;
  int64_t nonfinite;
};
template <class W, class Fetch>
__device__ Measured measured(Power power, int count, const Fetch& fetch, Kept<W>& kept) {
  W largest = 0;
  double squares = 0, sum = 0;
  int nonfinite = 0;
  for (int first = 0; first < count; first += kKept) {
    kept = fetch(first);
    bool finite = true;
    each_kept([&](int g, int k) { finite &= fabs(kept.x[g][k]) < infinity<W>; });
    const auto take = [&](const auto& size_of) {
      each_kept([&](int g, int k) { largest = max(largest, size_of(kept.x[g][k])); });
      if (power != kMaximum)
        each_kept([&](int g, int k) { sum += double(size_of(kept.x[g][k])) * double(size_of(kept.x[g][k])); });
    };
    if (finite) {
      take([](W x) { return fabs(x); });
    } else {
      each_kept([&](int g, int k) { nonfinite += !(fabs(kept.x[g][k]) < infinity<W>); });
      take([](W x) { return fabs(x) < infinity<W> ? fabs(x) : W(0); });
    }
    if (power == kMaximum) continue;
    if (first + kKept < count && (first + kKept) % kBlock != 0) continue;
    squares += __shfl_sync(kAllLanes, combine_warp(sum), 0);
    sum = 0;
  }
  for (int half = kWarp / 2; half > 0; half /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, half));
  const double most = double(largest);
  return {power == kMaximum ? norm_at_least(most) : norm_from_squares(squares, most), nonfinite};
}

// The records of a unit of work: more where there are several tensors, as a warp looks for theirs first.
__host__ __device__ constexpr int64_t records_at_once(bool several) { return several ? 4 : 1; }

// ---- values -----------------------------------------------------------------------------------------------

// Those of `count` elements of a gradient that a warp keeps from `first` on.
template <class T> __device__ Kept<Work<T>> values_of(const T* x, int count, int first) {
  using W = Work<T>;
  Kept<W> kept;
  const T* mine = x + first + lane_index();
  const int left = count - first - lane_index();
  if (first + kKept <= count)
    each_kept([&](int g, int k) { kept.x[g][k] = to_work(mine[kept_at(g, k)]); });
  else
    each_kept([&](int g, int k) { kept.x[g][k] = kept_at(g, k) < left ? W(to_work(mine[kept_at(g, k)])) : W(0); });
  return kept;
}

template <bool kBytes> __device__ int32_t code_at(const uint8_t* codes, int64_t i, int bits) {
  return kBytes ? int8_t(codes[i]) : packed_code(codes, i, bits);
}

// A lane asks for the norm of a part: all of them are under way at once, and so are the divisions by them below.
__device__ inline float largest_norm(const PartList<uint8_t>& parts, int64_t part_count, int64_t at) {
  float largest = 0;
  for (int64_t part = lane_index(); part < part_count; part += kWarp) largest = max(largest, norm_at(parts[part] + at));
  for (int half = kWarp / 2; half > 0; half /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, half));
  return largest;
}

// The sums of the records at `at` of all parts.
template <bool kBytes> __device__ Kept<float> sums_of(const PartList<uint8_t>& parts, int64_t part_count, int64_t at,
                                                      const QsgdShape& shape, float power, int first) {
  const int block = int(shape.block);
  const int32_t levels = levels_of(shape.bits);
  Kept<float> sums;
  const int64_t mine = first + lane_index();
  const int left = block - first - lane_index();
  each_kept([&](int g, int k) { sums.x[g][k] = kept_at(g, k) < left ? -0.0f : 0.0f; });
  float units = 0;  // of as many parts, a lane's
  for (int64_t part = 0; part < part_count; ++part) {
    const int lane = int(part % kWarp);
    const int64_t asked = part + lane_index();
    if (lane == 0 && asked < part_count) units = fold_unit(norm_at(parts[asked] + at), power, levels);
    const uint8_t* record = parts[part] + at;
    const float unit = __shfl_sync(kAllLanes, units, lane);
    const auto add = [&](int g, int k) {
      sums.x[g][k] += float(code_at<kBytes>(record + kNormBytes, mine + kept_at(g, k), shape.bits)) * unit;
    };
    if (first + kKept <= block)
      each_kept(add);
    else
      each_kept([&](int g, int k) {
        if (kept_at(g, k) < left) add(g, k);
      });
  }
  return sums;
}

}  // namespace
}  // namespace hvc
