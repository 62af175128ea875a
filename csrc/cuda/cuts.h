// The k-th largest magnitude of each side, digit by digit, in all tensors of a table at once.
#pragma once
#include "rules/select.h"
#include "grid.h"
#include "rows.h"
#include "scan.h"
#include "select_operands.h"

namespace hvc {
namespace {

// A zero stands for NaN: neither is ever kept.
template <class W> __device__ W less_nan(W x) { return x > 0 || x < 0 ? x : W(0); }

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
template <class K> constexpr int kKeyBits = int(8 * sizeof(K));
template <class K> constexpr int kDigits = (kKeyBits<K> + kDigitBits - 1) / kDigitBits;

// What is known of the k-th largest key of a side: its digits so far, and which of the keys with these digits it is.
// `whole` says that all keys are kept.
template <class K> struct Search {
  K key;
  int64_t rank;
  bool whole;
};

// ---- where keys come from -----------------------------------------------------------------------------------
// A warp tallies or compacts a chunk of a source at a time.

template <class T> struct Whole {
  using W = Work<T>;
  static constexpr int64_t kChunk = 1024;
  Input<T> in;
  __device__ int64_t size() const { return in.count; }
  __device__ W value(int64_t i) const { return offered(in.grad, in.residual, i); }
  __device__ int32_t position(int64_t i) const { return int32_t(i); }
};

constexpr int64_t kShortChunk = 128;  // so that there is work for many warps

// Every `step`-th element. They lie far apart: what is found of them is kept for the digits after the first.
template <class T> struct Sampled {
  using W = Work<T>;
  static constexpr int64_t kChunk = kShortChunk;
  Input<T> in;
  int64_t step;
  W* kept;
  __device__ int64_t size() const { return in.count / step; }
  __device__ W value(int64_t i) const { return kept[i] = offered(in.grad, in.residual, i * step); }
};
template <class V> struct Sample {
  using W = V;
  static constexpr int64_t kChunk = kShortChunk;
  const V* values;
  int64_t count;
  __device__ int64_t size() const { return count; }
  __device__ V value(int64_t i) const { return values[i]; }
};

// The position is as wide as the value: what a warp reads has no gaps that nobody has written.
template <class V> struct Candidate {
  V value;
  std::conditional_t<sizeof(V) == 8, int64_t, int32_t> position;
};

// The elements that may be kept, in index order. More may have been found than there is room for.
template <class V> struct Few {
  using W = V;
  static constexpr int64_t kChunk = kShortChunk;
  Candidate<V>* list;
  const int64_t* found;
  int64_t room;
  __device__ int64_t size() const { return min(*found, room); }
  __device__ W value(int64_t i) const { return list[i].value; }
  __device__ int32_t position(int64_t i) const { return int32_t(list[i].position); }
};

// ---- what a table holds -------------------------------------------------------------------------------------

// What remains on one side, in index order.
template <class W> struct Kept {
  int32_t* positions;
  W* values;
};

// The search in one source: how many are wanted of each side, where they go, and how many these are, which begins with
// 0. What is not finite is counted where it is asked for.
template <int kSides, class Source> struct Task {
  using W = typename Source::W;
  using K = Key<W>;
  static constexpr int sides = kSides;
  Source source;
  int64_t k;
  Kept<W> kept[kSides];
  int64_t *sizes, *nonfinite;
};

// A block takes a unit of a source: a chunk for each of its warps.
constexpr int kWarps = kThreads / kWarp;
template <class Source> constexpr int64_t kUnit = kWarps * Source::kChunk;

// Calls run(table) with a search of its own: in at most so many keys.
template <class Task, class Run> void alone(const Task& task, int64_t size, const Run& run) {
  constexpr int64_t unit = kWarps * decltype(task.source)::kChunk;
  fill<Task, 1>(
      0, 1, [&](int64_t) { return task; }, [&](int64_t) { return ceil_div(size, unit); },
      [&](const auto& table, int64_t) { run(table); });
}

// ---- digits -------------------------------------------------------------------------------------------------

// One digit of all keys of a search, and where it counts.
template <class K> struct Digit {
  int shift, above;  // the lowest bit of it, and of the digits before it
  int64_t k;
  int64_t* counts;
  unsigned* arrived;
  Search<K>* searches;
};

// Where the searches of a table count, and what they have found. Between two digits the bins are empty.
template <int kSides, class K> struct Searches {
  static constexpr int64_t kEach = kSides * kBins + 1;  // numbers of one search; the last one is for blocks
  int64_t* counts;
  Search<K>* found;

  __host__ __device__ Digit<K> digit(int number, int64_t item, int64_t k) const {
    const int above = kKeyBits<K> - number * kDigitBits, shift = above > kDigitBits ? above - kDigitBits : 0;
    int64_t* const mine = counts + item * kEach;
    return {shift, above, k, mine, reinterpret_cast<unsigned*>(mine + kSides * kBins), found + item * kSides};
  }
};

// Memory for the bins of so many searches.
template <int kSides> class EmptyBins {
 public:
  EmptyBins(int64_t searches, Launch launch) : memory_(searches * kEach, launch) {
    clear(memory_.get(), searches * kEach * int64_t(sizeof(int64_t)), launch);
  }
  int64_t* get() const { return memory_.get(); }

 private:
  static constexpr int64_t kEach = Searches<kSides, uint32_t>::kEach;
  Scratch<int64_t> memory_;
};

// What to note of candidates at the first digit.
template <class K> struct Noted {
  const Search<K>* floors = nullptr;
  const int64_t* found = nullptr;  // how many these are
  int64_t room = 0;
  int64_t* wanting = nullptr;  // becomes 1 if the k largest are not among them
};

// Of a side whose candidates begin at a key there have to be k; 0 lets all pass.
template <class K> __device__ void note_want(const Noted<K>& noted, const Digit<K>& digit, int side, int64_t total) {
  if (!noted.wanting) return;
  const bool enough = noted.floors[side].key == 0 || total >= digit.k;
  if (!enough || *noted.found > noted.room) *noted.wanting = 1;
}

// The last block of a search chooses the digit of each side, and empties the bins for the next one.
template <int kSides, class K> __device__ void choose(const Digit<K>& digit, const Noted<K>& noted) {
  if (threadIdx.x == 0) *digit.arrived = 0;
  for (int side = 0; side < kSides; ++side) {
    Search<K> s = digit.above == kKeyBits<K> ? Search<K>{0, digit.k, false} : digit.searches[side];
    int64_t* const bins = digit.counts + side * kBins;
    const Ranked ranked = bin_of_rank<kBins>(bins, s.rank);
    for (int i = int(threadIdx.x); i < kBins; i += kThreads) bins[i] = 0;
    if (threadIdx.x != 0 || s.whole) continue;
    const bool first = digit.above == kKeyBits<K>;
    if (first) note_want(noted, digit, side, ranked.total);
    if (first && ranked.total <= s.rank)
      digit.searches[side] = {0, 0, true};
    else
      digit.searches[side] = {K(s.key | K(ranked.bin) << digit.shift), ranked.rank, false};
  }
}

// The bins of a block in shared memory: they begin empty, and are added to those of the search at the end.
template <int kSides> struct Bins {
  unsigned counts[kSides * kBins];

  __device__ void begin() {
    for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) counts[i] = 0;
    __syncthreads();
  }
  template <class W> __device__ void take(W x, int shift) {
    atomicAdd(&counts[side_of<kSides>(x) * kBins + int(key_of(x) >> shift & (kBins - 1))], 1u);
  }
  template <class K> __device__ void end(const Digit<K>& digit, int64_t blocks, const Noted<K>& noted) {
    __syncthreads();
    for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) add_count(digit.counts + i, counts[i]);
    if (is_last_of(digit.arrived, unsigned(blocks))) choose<kSides>(digit, noted);
  }
};

// Counts a digit of the keys of a unit that agree with the search so far; returns how many are not finite.
template <int kSides, class Source, class K>
__device__ int64_t count_unit(const Source& source, int64_t unit, const Digit<K>& digit, Bins<kSides>& bins) {
  using W = typename Source::W;
  const bool first = digit.above == kKeyBits<K>;
  const K above = first ? K(0) : K(~K(0) << digit.above);
  K known[kSides];
  for (int side = 0; side < kSides; ++side) known[side] = first ? K(0) : digit.searches[side].key & above;
  const int64_t end = min((unit + 1) * kUnit<Source>, source.size());
  int64_t bad = 0;
  for (int64_t begin = unit * kUnit<Source> + threadIdx.x; begin < end; begin += kInFlight * kThreads) {
    W given[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = begin + k * kThreads;
      given[k] = i < end ? source.value(i) : W(0);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const W x = less_nan(given[k]);
      bad += !is_finite(given[k]);
      const K key = key_of(x), wanted = side_of<kSides>(x) == 0 ? known[0] : known[kSides - 1];
      if (key != 0 && (key & above) == wanted) bins.take(x, digit.shift);
    }
  }
  return bad;
}

template <class Task, int kRoom> __global__ void digits_kernel(const __grid_constant__ Table<Task, kRoom> table,
                                                               Searches<Task::sides, typename Task::K> searches,
                                                               int number) {
  __shared__ Bins<Task::sides> bins;
  for (int64_t unit = blockIdx.x; unit < table.units(); unit += gridDim.x) {
    const int item = table.item_of(unit);
    const Task& task = table.items[item];
    const auto digit = searches.digit(number, item, task.k);
    bins.begin();
    const int64_t bad = count_unit(task.source, unit - table.begins[item], digit, bins);
    if (number == 0 && task.nonfinite) add_count(task.nonfinite, bad);
    bins.end(digit, table.begins[item + 1] - table.begins[item], Noted<typename Task::K>{});
  }
}

// Starts a kernel with a block for each unit of a table.
template <class Table, class... Parameters, class... Arguments> void start_units(void (*kernel)(Table, Parameters...),
                                                                                 const Table& table, Launch launch,
                                                                                 const Arguments&... arguments) {
  start_blocks(kernel, std::min(table.units(), kMostBlocks), kThreads, launch, table, arguments...);
}

// Finds digits `first` to `end` - 1 of the k-th largest key of each side, in all sources of a table.
template <class Task, int kRoom> void find_digits(const Table<Task, kRoom>& table,
                                                  const Searches<Task::sides, typename Task::K>& searches, int first,
                                                  int end, Launch launch) {
  for (int number = first; number < end; ++number)
    start_units(digits_kernel<Task, kRoom>, table, launch, searches, number);
}

}  // namespace
}  // namespace hvc
