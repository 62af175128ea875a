// Count sketches: tables that add up, and the largest elements that can be read from them.
#include "rules/sketch.h"

#include "rules/dense.h"
#include "launch.h"
#include "scan.h"
#include "sketch_operands.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- encode -----------------------------------------------------------------------------------------------
// A thread owns a cell and fetches what belongs there, layer by layer: so the order of additions is that of the CPU.

// place -> (inverse * (place - start)) mod C
struct WalkBack {
  uint32_t inverse, start;
};

constexpr int64_t kLayers = 1 << 16;  // whose maps are in memory together

// step^(C - 2) mod C, the inverse by Fermat.
__device__ uint32_t inverse_of(uint32_t step, uint32_t places) {
  uint64_t power = step, inverse = 1;
  for (uint32_t exponent = places - 2; exponent != 0; exponent /= 2) {
    if (exponent % 2 != 0) inverse = inverse * power % places;
    power = power * power % places;
  }
  return uint32_t(inverse);
}

__global__ void walks_kernel(SketchMap map, int64_t first_layer, int64_t layers, WalkBack* walks) {
  for (int64_t i = first_item(); i < layers * map.rows; i += item_stride()) {
    const Walk walk = walk_of(map, int(i / layers), uint64_t(first_layer + i % layers));
    walks[i] = {inverse_of(walk.step, map.places), walk.start};
  }
}

template <class T> __device__ Work<T> x_at(const SketchEncode<T>& e, int64_t i) {
  Work<T> x = to_work(e.grad[i]);
  if (e.momentum) x = with_momentum(e.factor, e.momentum[i], x);
  return e.residual ? e.residual[i] + x : x;
}

template <class T> __global__ void encode_kernel(SketchEncode<T> e, const WalkBack* walks, int64_t first_layer,
                                                 int64_t layers, int64_t* nonfinite) {
  using W = Work<T>;
  const int64_t columns = sketch_columns(e.map), places = e.map.places;
  const int64_t begin = e.offset / kSketchBlock, end = ceil_div(e.offset + e.count, kSketchBlock);
  int64_t bad = 0;
  for (int64_t cell = first_item(); cell < columns * e.map.rows; cell += item_stride()) {
    const int row = int(cell / columns);
    const int64_t place = cell % columns / kSketchBlock, lane = cell % kSketchBlock;
    W sum = e.table[cell];
    for (int64_t layer = 0; layer < layers; ++layer) {
      const WalkBack walk = walks[row * layers + layer];
      const uint64_t distance = uint64_t(place >= walk.start ? place - walk.start : place + places - walk.start);
      const int64_t block = (first_layer + layer) * places + int64_t(walk.inverse * distance % uint64_t(places));
      if (block < begin || block >= end) continue;
      const BlockBits bits = block_bits(e.map.key, uint64_t(block));
      const int64_t from = lane ^ int64_t(turn_of(bits, row)), i = block * kSketchBlock + from - e.offset;
      const W x = i < e.count ? x_at(e, i) : W(0);
      bad += row == 0 && !is_finite(x);
      sum += negated_if(sign_bits(bits, row) >> from & 1u, x);
    }
    e.table[cell] = sum;
  }
  add_count(nonfinite, bad);
}

// ---- estimates --------------------------------------------------------------------------------------------

// Loops over rows have a length that the compiler knows: their arrays stay in registers.
struct Walks {
  Walk of_row[kSketchRows];
};
__device__ inline Walks walks_of(const SketchMap& map, uint64_t layer) {
  Walks walks{};
#pragma unroll
  for (int row = 0; row < kSketchRows; ++row)
    if (row < map.rows) walks.of_row[row] = walk_of(map, row, layer);
  return walks;
}

template <class W>
__device__ Int<W> estimate_bits(const SketchTable<W>& s, const Walks& walks, const BlockBits& bits, const Element& e) {
  Int<W> order[kSketchRows] = {};
#pragma unroll
  for (int row = 0; row < kSketchRows; ++row) {
    if (row >= s.map.rows) continue;
    const W cell = s.table[cell_of(s.map, row, walks.of_row[row], bits, e)];
    order[row] = order_of(negated_if(sign_bits(bits, row) >> e.lane & 1u, cell));
  }
  return turn_negative(median(order, s.map.rows), IntOf<W>::kMagnitude);
}

// Calls use(position, bits of the estimate) for the elements of one unit.
template <class W, class Use> __device__ void each_of_unit(const SketchTable<W>& s, int64_t unit, const Use& use) {
  const SketchSpan span = s.spans[span_index(s.spans, s.span_count, unit)];
  const int64_t begin = span.start + (unit - span.units) * kSketchBlock;
  const int64_t end = min(begin + kSketchBlock, span.start + span.count);
  Element e = element_of(s.map, uint64_t(begin));
  const BlockBits bits = block_bits(s.map.key, e.block);
  const Walks walks = walks_of(s.map, e.layer);
  for (int64_t position = begin; position < end; ++position, ++e.lane) use(position, estimate_bits(s, walks, bits, e));
}

// Threads that clear the same cell write the same.
template <class W> __global__ void clear_kernel(W* table, SketchMap map, const int64_t* positions, int64_t count) {
  for (int64_t i = first_item(); i < count * map.rows; i += item_stride()) {
    const Element e = element_of(map, uint64_t(positions[i / map.rows]));
    const int row = int(i % map.rows);
    table[cell_of(map, row, walk_of(map, row, e.layer), block_bits(map.key, e.block), e)] = 0;
  }
}

// ---- the largest ------------------------------------------------------------------------------------------

constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;
template <class W> constexpr int kDigits = sizeof(W) == 4 ? 3 : 6;

// The magnitude of the k-th largest as far as it is known, and its rank among those that begin so.
struct Bound {
  int64_t prefix, rank;
};

template <class W> __global__ void histogram_kernel(SketchTable<W> s, const Bound* bound, int shift, int64_t* bins) {
  __shared__ unsigned counts[kBins];
  for (int bin = int(threadIdx.x); bin < kBins; bin += int(blockDim.x)) counts[bin] = 0;
  __syncthreads();
  const int64_t prefix = bound->prefix;
  for (int64_t unit = first_item(); unit < s.units; unit += item_stride())
    each_of_unit(s, unit, [&](int64_t, Int<W> bits) {
      const int64_t upper = int64_t(bits & IntOf<W>::kMagnitude) >> shift;
      if (upper >> kDigitBits == prefix) atomicAdd(&counts[upper & (kBins - 1)], 1u);
    });
  __syncthreads();
  for (int bin = int(threadIdx.x); bin < kBins; bin += int(blockDim.x)) add_count(bins + bin, counts[bin]);
}

__global__ void choose_kernel(const int64_t* bins, Bound* bound) {
  int64_t rank = bound->rank;
  int digit = kBins - 1;
  for (; digit > 0 && bins[digit] < rank; --digit) rank -= bins[digit];
  *bound = {bound->prefix << kDigitBits | digit, rank};
}

// Above the bound all are taken, at the bound the first `rank`; zeros never.
__device__ inline int64_t ties_of(const Bound& bound) { return bound.prefix == 0 ? 0 : bound.rank; }

// How many of each unit are above the bound (in the upper half) and at it; 0 after the last unit. Fewer are above
// than were asked for, so the sums of all units have no sign.
template <class W> __global__ void count_kernel(SketchTable<W> s, const Bound* bound, int64_t* counts) {
  const int64_t limit = bound->prefix;
  for (int64_t unit = first_item(); unit <= s.units; unit += item_stride()) {
    int64_t count = 0;
    if (unit < s.units)
      each_of_unit(s, unit, [&](int64_t, Int<W> bits) {
        const int64_t magnitude = bits & IntOf<W>::kMagnitude;
        count += magnitude > limit ? int64_t(1) << 32 : int64_t(magnitude == limit);
      });
    counts[unit] = count;
  }
}

template <class W> __global__ void write_kernel(SketchTable<W> s, const Bound* bound, const int64_t* before,
                                                int64_t* positions, W* estimates, int64_t* found) {
  const int64_t limit = bound->prefix, ties = ties_of(*bound);
  for (int64_t unit = first_item(); unit <= s.units; unit += item_stride()) {
    int64_t above = before[unit] >> 32, equal = before[unit] & 0xffffffff;
    if (unit == s.units) {
      *found = above + min(equal, ties);
      continue;
    }
    each_of_unit(s, unit, [&](int64_t position, Int<W> bits) {
      const int64_t magnitude = bits & IntOf<W>::kMagnitude, at = above + min(equal, ties);
      const bool tie = magnitude == limit;
      if (magnitude > limit || (tie && equal < ties)) {
        positions[at] = position;
        estimates[at] = bit_cast<W>(bits);
      }
      above += magnitude > limit;
      equal += tie;
    });
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

template <class W> void find_bound(const SketchTable<W>& s, int64_t k, Bound* bound, Launch launch) {
  const Bound start_value{0, k};
  check(cudaMemcpyAsync(bound, &start_value, sizeof start_value, cudaMemcpyHostToDevice, stream_of(launch)),
        "cudaMemcpyAsync");
  const Scratch<int64_t> bins(kBins, launch);
  for (int digit = kDigits<W> - 1; digit >= 0; --digit) {
    clear(bins.get(), kBins * int64_t(sizeof(int64_t)), launch);
    // Every block adds all its bins at its end: rather few blocks.
    start(histogram_kernel<W>, std::min<int64_t>(s.units, 1 << 18), launch, s, bound, digit * kDigitBits, bins.get());
    start_blocks(choose_kernel, 1, 1, launch, bins.get(), bound);
  }
}

template <class W>
int64_t run_top(const SketchTable<W>& s, int64_t k, int64_t* positions, W* estimates, Launch launch) {
  const Scratch<Bound> bound(1, launch);
  const Scratch<int64_t> counts(s.units + 1, launch), found(1, launch);
  find_bound(s, k, bound.get(), launch);
  start(count_kernel<W>, s.units + 1, launch, s, bound.get(), counts.get());
  prefix_sums(counts.get(), counts.get(), s.units + 1, launch);
  start(write_kernel<W>, s.units + 1, launch, s, bound.get(), counts.get(), positions, estimates, found.get());
  int64_t count = 0;
  fetch(&count, static_cast<const int64_t*>(found.get()), 1, launch);
  return count;
}

}  // namespace

void sketch_encode(const void* grad, const void* residual, const void* momentum, double factor, Dtype dtype,
                   int64_t count, int64_t offset, int rows, int64_t places, const Stream* key, void* table,
                   int64_t* nonfinite, Launch launch) {
  clear_counts(nonfinite, 1, launch);
  if (count == 0) return;
  const SketchMap map{rows, uint32_t(places), *key};
  const int64_t last = (offset + count - 1) / sketch_columns(map) + 1;
  const Scratch<WalkBack> walks(std::min(last, kLayers) * rows, launch);
  for (int64_t layer = offset / sketch_columns(map); layer < last; layer += kLayers) {
    const int64_t layers = std::min(last - layer, kLayers);
    start(walks_kernel, layers * rows, launch, map, layer, layers, walks.get());
    visit(dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      using W = Work<T>;
      const SketchEncode<T> e{static_cast<const T*>(grad),
                              static_cast<const W*>(residual),
                              static_cast<const W*>(momentum),
                              W(factor),
                              count,
                              offset,
                              map,
                              static_cast<W*>(table)};
      start(encode_kernel<T>, sketch_columns(map) * rows, launch, e, walks.get(), layer, layers, nonfinite);
    });
  }
}

// Waits for its stream: its result is a number for the host.
int64_t sketch_top(const void* table, Dtype dtype, int rows, int64_t places, const Stream* key, const Span* spans,
                   int64_t span_count, int64_t k, int64_t* positions, void* estimates, Launch launch) {
  const SketchSpans listed(spans, span_count);
  k = std::min(k, listed.elements);
  if (k == 0) return 0;
  const Scratch<SketchSpan> placed(listed.size(), launch);
  check(cudaMemcpyAsync(placed.get(), listed.list.data(), listed.list.size() * sizeof(SketchSpan),
                        cudaMemcpyHostToDevice, stream_of(launch)),
        "cudaMemcpyAsync");
  int64_t found = 0;
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const SketchMap map{rows, uint32_t(places), *key};
    const SketchTable<W> s{static_cast<const W*>(table), map, placed.get(), listed.size(), listed.units};
    found = run_top(s, k, positions, static_cast<W*>(estimates), launch);
  });
  return found;
}

void sketch_clear(void* table, Dtype dtype, int rows, int64_t places, const Stream* key, const int64_t* positions,
                  int64_t count, Launch launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const SketchMap map{rows, uint32_t(places), *key};
    start(clear_kernel<W>, count * rows, launch, static_cast<W*>(table), map, positions, count);
  });
}

}  // namespace hvc
