// Count sketches: tables that add up, and the largest elements that can be read from them.
#include "rules/sketch.h"

#include "rules/dense.h"
#include "grid.h"
#include "rows.h"
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

// What a layer adds to a place: which block of the gradient, if any, with which signs and how turned.
struct Visit {
  int32_t block;  // counts from the gradient's first one; or -1
  uint32_t bits;  // the signs, then the turn
};
template <class T>
__device__ Visit visit_of(const SketchEncode<T>& e, const WalkBack& walk, int64_t layer, int row, int64_t place) {
  const int64_t places = e.map.places;
  const uint64_t distance = uint64_t(place >= walk.start ? place - walk.start : place + places - walk.start);
  const int64_t block = layer * places + int64_t(walk.inverse * distance % uint64_t(places));
  const int64_t begin = e.offset / kSketchBlock, end = ceil_div(e.offset + e.count, kSketchBlock);
  if (block < begin || block >= end) return {-1, 0};
  const BlockBits bits = block_bits(e.map.key, uint64_t(block));
  return {int32_t(block - begin), sign_bits(bits, row) | turn_of(bits, row) << kSketchBlock};
}

// Each lane of a place finds the block of another layer, and tells the others.
template <class T> __global__ void encode_kernel(SketchEncode<T> e, const WalkBack* walks, int64_t first_layer,
                                                 int64_t layers, int64_t* nonfinite) {
  using W = Work<T>;
  const int64_t columns = sketch_columns(e.map), cells = columns * e.map.rows;
  const int lane = lane_index() % kSketchBlock, first_lane = lane_index() - lane;
  int64_t bad = 0;
  for (int64_t cell = first_item(); cell - lane_index() < cells; cell += item_stride()) {
    const bool there = cell < cells;
    const int row = there ? int(cell / columns) : 0;
    const int64_t place = cell % columns / kSketchBlock;
    W sum = there ? e.table[cell] : W(0);
    for (int64_t first = 0; first < layers; first += kSketchBlock) {
      const int64_t mine = first + lane;
      const Visit visit = there && mine < layers
                              ? visit_of(e, walks[row * layers + mine], first_layer + mine, row, place)
                              : Visit{-1, 0};
      for (int next = 0; next < kSketchBlock && first + next < layers; next += kInFlight) {
        W x[kInFlight];
        Visit now[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          now[k].block = __shfl_sync(kAllLanes, visit.block, first_lane + next + k);
          now[k].bits = __shfl_sync(kAllLanes, visit.bits, first_lane + next + k);
          const int from = lane ^ int(now[k].bits >> kSketchBlock);
          const int i = now[k].block * kSketchBlock + from;
          x[k] = now[k].block >= 0 && i < e.count ? x_at(e, i) : W(0);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          if (now[k].block < 0) continue;
          bad += row == 0 && !is_finite(x[k]);
          sum += negated_if(now[k].bits >> (lane ^ int(now[k].bits >> kSketchBlock)) & 1u, x[k]);
        }
      }
    }
    if (there) e.table[cell] = sum;
  }
  add_count(nonfinite, bad);
}

// ---- estimates --------------------------------------------------------------------------------------------
// A lane finds where a unit's cells are; then half a warp reads them, neighbours at a time.

// The compiler knows the number of rows: arrays stay in registers.
template <int kRows> struct UnitCells {
  int size;                // how many of its elements there are
  uint32_t places[kRows];  // the first cell of its place; how it is turned, in the bits of the cells of a place
  BlockBits bits;
};
template <int kRows, class W> __device__ UnitCells<kRows> cells_of_unit(const SketchTable<W>& s, int64_t unit) {
  const SketchSpan span = s.spans[span_index(s.spans, s.span_count, unit)];
  const int64_t first = (unit - span.units) * kSketchBlock;
  const Element e = element_of(s.map, uint64_t(span.start + first));
  UnitCells<kRows> cells{int(min(int64_t(kSketchBlock), span.count - first)), {}, block_bits(s.map.key, e.block)};
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint32_t place = place_of(walk_of(s.map, row, e.layer), s.map.places, e.block_of_layer);
    cells.places[row] = place * kSketchBlock | turn_of(cells.bits, row);
  }
  return cells;
}

// What another lane holds.
template <int kRows> __device__ UnitCells<kRows> cells_of_lane(const UnitCells<kRows>& mine, int lane) {
  UnitCells<kRows> cells{__shfl_sync(kAllLanes, mine.size, lane), {}, {}};
#pragma unroll
  for (int row = 0; row < kRows; ++row) cells.places[row] = __shfl_sync(kAllLanes, mine.places[row], lane);
  cells.bits.low = __shfl_sync(kAllLanes, mine.bits.low, lane);
  cells.bits.high = __shfl_sync(kAllLanes, uint32_t(mine.bits.high), lane);
  return cells;
}

template <int kRows, class W>
__device__ Int<W> estimate_bits(const SketchTable<W>& s, const UnitCells<kRows>& cells, int element) {
  W given[kRows];
  Int<W> order[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    given[row] = s.table[row * sketch_columns(s.map) + (cells.places[row] ^ uint32_t(element))];
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    order[row] = order_of(negated_if(sign_bits(cells.bits, row) >> element & 1u, given[row]));
  return turn_negative(median(order, kRows), IntOf<W>::kMagnitude);
}

// Writes the bits of the estimates of all units; 0 past the end of a span.
template <int kRows, class W> __global__ void estimates_kernel(SketchTable<W> s, Int<W>* estimates) {
  const int half = lane_index() / kSketchBlock, element = lane_index() % kSketchBlock;
  for (int64_t first = kWarp * first_warp(); first < s.units; first += kWarp * warp_stride()) {
    const int64_t mine = first + lane_index();
    const auto cells = mine < s.units ? cells_of_unit<kRows>(s, mine) : UnitCells<kRows>{};
    for (int pair = 0; pair < kWarp; pair += 2) {
      const auto of_unit = cells_of_lane(cells, pair + half);
      const int64_t unit = first + pair + half;
      if (unit >= s.units) continue;
      estimates[unit * kSketchBlock + element] = element < of_unit.size ? estimate_bits(s, of_unit, element) : 0;
    }
  }
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
constexpr int64_t kChunk = 1024;  // elements that a warp takes

// The magnitude of the k-th largest as far as it is known, and its rank among those that begin so.
struct Bound {
  int64_t prefix, rank;
};

// A digit of the magnitudes, and where it counts.
struct Digit {
  int shift;
  bool first;
  int64_t k;
  int64_t* bins;
  unsigned* arrived;
  Bound* bound;
};

// Counts a digit of the magnitudes that agree with the bound so far; the last block chooses the bound's.
template <class W> __global__ void histogram_kernel(const Int<W>* estimates, int64_t count, Digit digit) {
  __shared__ unsigned counts[kBins];
  for (int bin = int(threadIdx.x); bin < kBins; bin += kThreads) counts[bin] = 0;
  __syncthreads();
  const Bound bound = digit.first ? Bound{0, digit.k} : *digit.bound;
  for (int64_t chunk = first_warp(); chunk * kChunk < count; chunk += warp_stride())
    each_loaded(
        chunk * kChunk, min((chunk + 1) * kChunk, count), [&](int64_t i) { return estimates[i]; },
        [&](int64_t, Int<W> bits) {
          const int64_t upper = int64_t(bits & IntOf<W>::kMagnitude) >> digit.shift;
          if (upper >> kDigitBits == bound.prefix) atomicAdd(&counts[upper & (kBins - 1)], 1u);
        });
  __syncthreads();
  for (int bin = int(threadIdx.x); bin < kBins; bin += kThreads) add_count(digit.bins + bin, counts[bin]);
  if (!is_last_block(digit.arrived)) return;
  const Ranked ranked = bin_of_rank<kBins>(digit.bins, bound.rank);
  if (threadIdx.x == 0) *digit.bound = {bound.prefix << kDigitBits | ranked.bin, ranked.rank};
}

// Above the bound all are taken, at the bound the first `rank`; zeros never.
__device__ inline int64_t ties_of(const Bound& bound) { return bound.prefix == 0 ? 0 : bound.rank; }

// Calls use(i, bits, lanes above the bound, lanes at it) for a chunk, in all lanes of a warp.
template <class W, class Use>
__device__ void each_of_chunk(const Int<W>* estimates, int64_t count, int64_t chunk, int64_t limit, const Use& use) {
  const int64_t end = min((chunk + 1) * kChunk, count);
#pragma unroll 4
  for (int64_t first = chunk * kChunk; first < end; first += kWarp) {
    const int64_t i = first + lane_index();
    const Int<W> bits = i < end ? estimates[i] : 0;
    const int64_t magnitude = bits & IntOf<W>::kMagnitude;
    use(i, bits, __ballot_sync(kAllLanes, magnitude > limit), __ballot_sync(kAllLanes, magnitude == limit));
  }
}

// How many of each chunk are above the bound (in the upper half) and at it; 0 after the last chunk. Fewer are above
// than were asked for, so the sums of all chunks have no sign.
template <class W>
__global__ void count_kernel(const Int<W>* estimates, int64_t count, const Bound* bound, int64_t* counts) {
  const int64_t limit = bound->prefix, chunks = ceil_div(count, kChunk);
  for (int64_t chunk = first_warp(); chunk <= chunks; chunk += warp_stride()) {
    int64_t sum = 0;
    each_of_chunk<W>(estimates, count, chunk, limit, [&](int64_t, Int<W>, unsigned above, unsigned equal) {
      sum += int64_t(__popc(above)) << 32 | __popc(equal);
    });
    if (lane_index() == 0) counts[chunk] = sum;
  }
}

template <class W> __global__ void write_kernel(SketchTable<W> s, const Int<W>* bits_of_all, const Bound* bound,
                                                const int64_t* before, int64_t* positions, W* estimates,
                                                int64_t* found) {
  const int64_t limit = bound->prefix, ties = ties_of(*bound), count = s.units * kSketchBlock;
  const int64_t chunks = ceil_div(count, kChunk);
  const unsigned lower = (1u << lane_index()) - 1;
  if (first_item() == 0) *found = (before[chunks] >> 32) + min(before[chunks] & 0xffffffff, ties);
  for (int64_t chunk = first_warp(); chunk < chunks; chunk += warp_stride()) {
    int64_t larger = before[chunk] >> 32, same = before[chunk] & 0xffffffff;
    each_of_chunk<W>(bits_of_all, count, chunk, limit, [&](int64_t i, Int<W> bits, unsigned above, unsigned equal) {
      const int64_t tie = same + __popc(equal & lower), at = larger + __popc(above & lower) + min(tie, ties);
      if (above >> lane_index() & 1u || (equal >> lane_index() & 1u && tie < ties)) {
        const int64_t unit = i / kSketchBlock;
        const SketchSpan& span = s.spans[span_index(s.spans, s.span_count, unit)];
        positions[at] = span.start + (unit - span.units) * kSketchBlock + i % kSketchBlock;
        estimates[at] = bit_cast<W>(bits);
      }
      larger += __popc(above);
      same += __popc(equal);
    });
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

template <class W> void find_bound(const Int<W>* estimates, int64_t count, int64_t k, Bound* bound, Launch launch) {
  constexpr int64_t kEach = kBins + 1;
  const Scratch<int64_t> bins(kDigits<W> * kEach, launch);
  clear(bins.get(), kDigits<W> * kEach * int64_t(sizeof(int64_t)), launch);
  for (int digit = kDigits<W> - 1; digit >= 0; --digit) {
    int64_t* const mine = bins.get() + digit * kEach;
    const Digit given{
        digit * kDigitBits, digit == kDigits<W> - 1, k, mine, reinterpret_cast<unsigned*>(mine + kBins), bound};
    // Every block adds all its bins at its end: rather few blocks.
    start(histogram_kernel<W>, std::min<int64_t>(count, 1 << 18), launch, estimates, count, given);
  }
}

template <class W>
int64_t run_top(const SketchTable<W>& s, int64_t k, int64_t* positions, W* estimates, Launch launch) {
  const int64_t count = s.units * kSketchBlock, chunks = ceil_div(count, kChunk);
  const Scratch<Int<W>> bits(count, launch);
  const Scratch<Bound> bound(1, launch);
  const Scratch<int64_t> counts(chunks + 1, launch), found(1, launch);
  auto* const kernel = s.map.rows == 1   ? estimates_kernel<1, W>
                       : s.map.rows == 3 ? estimates_kernel<3, W>
                                         : estimates_kernel<kSketchRows, W>;
  start(kernel, s.units, launch, s, bits.get());
  find_bound<W>(bits.get(), count, k, bound.get(), launch);
  start(count_kernel<W>, (chunks + 1) * kWarp, launch, bits.get(), count, bound.get(), counts.get());
  prefix_sums(counts.get(), counts.get(), chunks + 1, launch);
  start(write_kernel<W>, chunks * kWarp, launch, s, bits.get(), bound.get(), counts.get(), positions, estimates,
        found.get());
  int64_t size = 0;
  fetch(&size, static_cast<const int64_t*>(found.get()), 1, launch);
  return size;
}

}  // namespace

void sketch_encode(const void* grad, const void* residual, const void* momentum, double factor, Dtype dtype,
                   int64_t count, int64_t offset, int rows, int64_t places, const Stream* key, void* table,
                   int64_t* nonfinite, Launch launch) {
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
