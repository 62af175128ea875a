// Rows of elements on CUDA: the parts that warps take, and the bits that they vote on.
#pragma once
#include "rules/kept.h"
#include "rules/tree.h"
#include "launch.h"
#include "table.h"

namespace hvc {
namespace {

template <class T> __device__ Work<T> offered(const T* grad, const Work<T>* residual, int64_t i) {
  const Work<T> x = to_work(grad[i]);
  return residual ? x + residual[i] : x;
}

// What is kept, of the arithmetic type or of 16 bits, rounded by draws; see rules/kept.h. `first` is the number of the
// first element in the bucket.
template <class W> struct KeptArray {
  void* at;
  bool is_short;
  uint32_t first;  // its lower half counts
  KeptDraws draws;
  __device__ W operator[](int64_t i) const {
    return is_short ? W(to_work(static_cast<const BFloat16*>(at)[i])) : static_cast<const W*>(at)[i];
  }
  __device__ void put(int64_t i, W value) const {
    if (is_short) {
      const uint32_t place = (first + uint32_t(i)) * draws.factor + draws.moved;
      static_cast<BFloat16*>(at)[i] = {uint16_t(short_bits(bit_cast<uint32_t>(kept_float(value)), place))};
    } else {
      static_cast<W*>(at)[i] = value;
    }
  }
};
template <class W> __host__ __device__ KeptArray<W> kept_array(const void* at, Dtype dtype = kFloat32,
                                                               int64_t first = 0, KeptDraws draws = {}) {
  return {const_cast<void*>(at), dtype == kBFloat16, uint32_t(first), draws};
}

// Divisions of 64 bits are slow, and most tensors need none.
__device__ inline int64_t row_of(int64_t i, int64_t row_length, int64_t count) {
  if (row_length >= count) return 0;
  return count <= 0xffffffff ? int64_t(uint32_t(i) / uint32_t(row_length)) : i / row_length;
}

// A warp's part of consecutive elements: lane by lane, as the sums and the votes want them, with this many loads of
// each lane under way. Loads of 16 bytes would put neighbours into one lane, and need an alignment that gradients lack.
constexpr int kInFlight = 4;
constexpr int kGroups = 8;  // the same where little else needs registers

// How many elements of no particular order a warp takes in one go: more where there are several tensors, as it looks
// for theirs first.
__host__ __device__ constexpr int64_t in_one_go(bool several) { return (several ? 4 : 1) * kInFlight * kWarp; }

// Calls use(i, load(i)) for a lane's part of the elements of [first, last), with several loads under way.
template <class Load, class Use>
__device__ void each_loaded(int64_t first, int64_t last, const Load& load, const Use& use) {
  for (int64_t begin = first; begin < last; begin += kInFlight * kWarp) {
    decltype(load(first)) values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = begin + k * kWarp + lane_index();
      if (i < last) values[k] = load(i);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = begin + k * kWarp + lane_index();
      if (i < last) use(i, values[k]);
    }
  }
}

// The units of work on the elements of tensors, in no particular order.
template <class Tensor> auto units_in_one_go(const Tensor* tensors, int64_t tensor_count) {
  return [=](int64_t i) { return ceil_div(tensors[i].count, in_one_go(tensor_count > 1)); };
}

// Calls use(tensor, i, load(tensor, i)) for a lane's part of all of them.
template <class Table, class Load, class Use>
__device__ void each_loaded_of(const Table& table, const Load& load, const Use& use) {
  constexpr int64_t kMost = in_one_go(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const auto& tensor = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost;
    each_loaded(
        first, min(first + kMost, tensor.count), [&](int64_t i) { return load(tensor, i); },
        [&](int64_t i, const auto& value) { use(tensor, i, value); });
  }
}

// Loads a lane's part of several groups, `left` elements before the end: gradients, and what is added to them.
template <bool kWhole, class T, int kEach>
__device__ void load_offered(const T* grad, const KeptArray<Work<T>>& residual, int64_t at, int64_t left,
                             T (&given)[kEach], Work<T> (&kept)[kEach]) {
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const bool inside = kWhole || k * kWarp < left;
    given[k] = inside ? (grad + at)[k * kWarp] : T{};
    if (!residual.is_short)
      kept[k] = residual.at && inside ? (static_cast<const Work<T>*>(residual.at) + at)[k * kWarp] : Work<T>(0);
  }
  if (!residual.is_short) return;
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    kept[k] = residual.at && (kWhole || k * kWarp < left) ? residual[at + k * kWarp] : Work<T>(0);
}

// Writes what is kept of them.
template <bool kWhole, class W, int kEach>
__device__ void put_kept(const KeptArray<W>& into, int64_t at, int64_t left, const W (&values)[kEach]) {
  const auto each = [&](const auto& put) {
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (kWhole || k * kWarp < left) put(k);
  };
  if (into.is_short)
    each([&](int k) { into.put(at + k * kWarp, values[k]); });
  else
    each([&](int k) { (static_cast<W*>(into.at) + at)[k * kWarp] = values[k]; });
}

template <class T> struct Loaded {
  Work<T> x[kInFlight];  // 0 past the end
};
// Of gradients that are divided first, where there is something to divide by.
template <class T> __device__ Loaded<T> load_groups(const T* grad, const Work<T>* residual, int64_t begin, int64_t end,
                                                    const Work<T>* divisor = nullptr) {
  Loaded<T> loaded;
  T x[kInFlight];
  Work<T> by[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t i = begin + k * kWarp + lane_index();
    x[k] = i < end ? grad[i] : T{};
    loaded.x[k] = residual && i < end ? residual[i] : Work<T>(0);
    by[k] = divisor && i < end ? divisor[i] : Work<T>(1);
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const bool inside = begin + k * kWarp + lane_index() < end;
    const Work<T> mine = divisor ? to_work(x[k]) / by[k] : to_work(x[k]);
    loaded.x[k] = !inside ? Work<T>(0) : residual ? mine + loaded.x[k] : mine;
  }
  return loaded;
}

// Rows that end with whole halves share none with the next one.
__host__ __device__ inline bool has_whole_halves(int64_t count, int64_t row_length) {
  return row_length % kWarp == 0 || row_length >= count;
}

// Writes 32 bits from element `begin` on, in cleared memory where rows do not begin at a multiple of 32.
__device__ inline void put_bits(uint32_t* halves, int64_t begin, uint32_t bits, bool whole_halves) {
  const int shift = int(begin % kWarp);
  if (whole_halves) {
    halves[begin / kWarp] = bits;
    return;
  }
  atomicOr(halves + begin / kWarp, bits << shift);
  if (shift != 0 && bits >> (kWarp - shift) != 0) atomicOr(halves + begin / kWarp + 1, bits >> (kWarp - shift));
}

template <class W> __device__ W combine_warp(W lane) {
  for (int half = kWarp / 2; half > 0; half /= 2) lane += __shfl_down_sync(kAllLanes, lane, half);
  return lane;
}

}  // namespace
}  // namespace hvc
