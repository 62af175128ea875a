// Counters whose norm is about that of a gradient, see rules/norm_sketch.h.
#include "rules/norm_sketch.h"

#include <vector>

#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct Sketched {
  const T* grad;
  int64_t count, first_block;
  Work<T>* parts;  // of its units, one after the other
  double* sums;
};

// What a layer adds to a place: the bits of which block.
struct Block {
  int32_t number;
  uint32_t word;
};

// The unit's counter of this thread. Its place has 16 threads of a warp: each finds the block of another layer.
template <class T> __device__ Work<T> counter_of(const Sketched<T>& t, int64_t unit, int places, const Stream& key) {
  using W = Work<T>;
  const int lane = lane_index() % kSketchBlock, first_lane = lane_index() - lane;
  const int place = int(threadIdx.x) / kSketchBlock;
  const T* const grad = t.grad + unit * kNormUnit * kSketchBlock;
  const int count = int(min(t.count - unit * kNormUnit * kSketchBlock, kNormUnit * kSketchBlock));
  const int layers = int(ceil_div(count, int64_t(places) * kSketchBlock));
  const uint64_t first_block = uint64_t(t.first_block + unit * kNormUnit);
  W sum = 0;
  for (int first = 0; first < layers; first += kSketchBlock) {
    const int block = (first + lane) * places;
    const int mine = block + (place ^ int(norm_bits(key, first_block + uint64_t(block)).shift(places)));
    const Block found{mine, norm_bits(key, first_block + uint64_t(mine)).word};
    for (int next = 0; next < kSketchBlock && first + next < layers; next += kInFlight) {
      W x[kInFlight];
      bool negative[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int number = __shfl_sync(kAllLanes, found.number, first_lane + next + k);
        const NormBits bits{__shfl_sync(kAllLanes, found.word, first_lane + next + k)};
        const int from = lane ^ int(bits.turn()), i = number * kSketchBlock + from;
        negative[k] = bits.signs() >> from & 1u;
        x[k] = first + next + k < layers && i < count ? to_work(grad[i]) : W(0);
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) sum += negated_if(negative[k], x[k]);
    }
  }
  return sum;
}

// A block of threads takes a unit.
template <class T, class Table>
__global__ void units_kernel(const __grid_constant__ Table table, int places, Stream key) {
  const int counters = places * kSketchBlock;
  for (int64_t unit = blockIdx.x; unit < table.units(); unit += gridDim.x) {
    const int item = table.item_of(unit);
    const Sketched<T>& t = table.items[item];
    const int64_t number = unit - table.begins[item];
    if (int(threadIdx.x) >= counters) continue;
    t.parts[number * counters + threadIdx.x] = counter_of(t, number, places, key);
  }
}

// A block of threads adds up the units of a tensor, in their order.
template <class T, class Table> __global__ void sums_kernel(const __grid_constant__ Table table, int counters) {
  for (int64_t item = blockIdx.x; item < table.units(); item += gridDim.x) {
    const Sketched<T>& t = table.items[item];
    if (int(threadIdx.x) >= counters) continue;
    double sum = 0;
#pragma unroll 8
    for (int64_t unit = 0; unit < norm_units(t.count); ++unit) sum += double(t.parts[unit * counters + threadIdx.x]);
    t.sums[threadIdx.x] = canonical(sum);
  }
}

template <class T>
void run(const NormSketched* tensors, int64_t tensor_count, int places, const Stream& key, Launch launch) {
  const int counters = places * kSketchBlock;
  const auto units = [&](int64_t i) { return norm_units(tensors[i].count); };
  std::vector<int64_t> begins(size_t(tensor_count) + 1);
  for (int64_t i = 0; i < tensor_count; ++i) begins[size_t(i) + 1] = begins[size_t(i)] + units(i);
  const Scratch<Work<T>> parts(begins.back() * counters, launch);
  const auto item = [&](int64_t i) {
    const NormSketched& t = tensors[i];
    return Sketched<T>{static_cast<const T*>(t.grad), t.count, t.offset / kSketchBlock,
                       parts.get() + begins[size_t(i)] * counters, t.sums};
  };
  in_tables<Sketched<T>>(tensor_count, item, units, [&](const auto& table, int64_t) {
    start_groups(units_kernel<T, std::decay_t<decltype(table)>>, table.units(), launch, table, places, key);
  });
  in_tables<Sketched<T>>(
      tensor_count, item, [](int64_t) { return 1; },
      [&](const auto& table, int64_t) {
        start_groups(sums_kernel<T, std::decay_t<decltype(table)>>, table.units(), launch, table, counters);
      });
}

}  // namespace

void norm_sketch(const NormSketched* tensors, int64_t tensor_count, Dtype dtype, int places, const Stream* key,
                 Launch launch) {
  visit(dtype, [&](auto type) { run<typename decltype(type)::type>(tensors, tensor_count, places, *key, launch); });
}

}  // namespace hvc
