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

// The random words of a unit, which all threads of a block share.
struct Drawn {
  uint32_t signs[kNormUnit / kNormGroup][kSketchBlock], turns[kNormUnit / kNormGroup][kNormLayers];
};

__device__ void draw(int groups, uint64_t first_block, const Stream& key, Drawn* drawn) {
  for (int i = int(threadIdx.x); i < groups * kNormDigits; i += int(blockDim.x)) {
    const int group = i / kNormDigits, digit = i % kNormDigits;
    const uint64_t of = norm_counter(first_block + uint64_t(group) * kNormGroup);
    const Counter c = sketch_draw(key, uint32_t(digit), of);
    uint32_t* const into = digit < 4 ? drawn->signs[group] + 4 * digit : drawn->turns[group];
    into[0] = c.c0, into[1] = c.c1, into[2] = c.c2, into[3] = c.c3;
  }
}

// This thread's counter of a unit, which takes one element of each layer.
template <class T> __device__ Work<T> counter_of(const T* grad, int count, int places, const Drawn& drawn) {
  using W = Work<T>;
  const int lane = int(threadIdx.x) % kSketchBlock, place = int(threadIdx.x) / kSketchBlock;
  const int layers = int(ceil_div(count, int64_t(places) * kSketchBlock)), layers_of_group = kNormGroup / places;
  W sum = 0;
  for (int first = 0; first < layers; first += kInFlight) {
    W x[kInFlight];
    bool negative[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int layer = first + k, group = layer / layers_of_group;
      const bool inside = layer < layers;
      const NormTurn turn{inside ? drawn.turns[group][layer % layers_of_group] : 0};
      const int block = layer * places + int(turn.place(uint32_t(place), places)), from = lane ^ int(turn.element());
      const int i = block * kSketchBlock + from;
      negative[k] = inside && norm_negates(drawn.signs[group][from], block % kNormGroup);
      x[k] = inside && i < count ? to_work(grad[i]) : W(0);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum += negated_if(negative[k], x[k]);
  }
  return sum;
}

// A block of threads takes a unit.
template <class T, class Table>
__global__ void units_kernel(const __grid_constant__ Table table, int places, Stream key) {
  __shared__ Drawn drawn;
  const int counters = places * kSketchBlock;
  for (int64_t unit = blockIdx.x; unit < table.units(); unit += gridDim.x) {
    const int item = table.item_of(unit);
    const Sketched<T>& t = table.items[item];
    const int64_t number = unit - table.begins[item], begin = number * kNormUnit * kSketchBlock;
    const int count = int(min(t.count - begin, kNormUnit * kSketchBlock));
    __syncthreads();  // the unit before is done
    draw(int(ceil_div(count, int64_t(kNormGroup) * kSketchBlock)), uint64_t(t.first_block + number * kNormUnit), key,
         &drawn);
    __syncthreads();
    if (int(threadIdx.x) < counters)
      t.parts[number * counters + threadIdx.x] = counter_of(t.grad + begin, count, places, drawn);
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
