// The k-th largest magnitude of each side, digit by digit; and what may be among the k largest, found in one pass.
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

constexpr int64_t kChunk = 1024;  // elements that a warp marks, gathers or compacts

template <class T> struct Whole {
  using W = Work<T>;
  static constexpr int64_t kChunk = hvc::kChunk;
  Input<T> in;
  __device__ int64_t size() const { return in.count; }
  __device__ W value(int64_t i) const { return offered(in.grad, in.residual, i); }
  __device__ int32_t position(int64_t i) const { return int32_t(i); }
};

// Every `step`-th element.
template <class T> struct Sampled {
  using W = Work<T>;
  Input<T> in;
  int64_t step;
  __device__ int64_t size() const { return in.count / step; }
  __device__ W value(int64_t i) const { return offered(in.grad, in.residual, i * step); }
};

template <class V> struct Candidate {
  V value;
  int32_t position;
};

// The elements that may be kept, in index order. More may have been found than there is room for.
template <class V> struct Few {
  using W = V;
  static constexpr int64_t kChunk = 128;  // so that there is work for many warps
  Candidate<V>* list;
  const int64_t* found;
  int64_t room;
  __device__ int64_t size() const { return min(*found, room); }
  __device__ W value(int64_t i) const { return list[i].value; }
  __device__ int32_t position(int64_t i) const { return list[i].position; }
};

// ---- digits -------------------------------------------------------------------------------------------------

// One digit of all keys of a search, and where it counts.
template <class K> struct Digit {
  int shift, above;  // the lowest bit of it, and of the digits before it
  int64_t k;
  int64_t* counts;
  unsigned* arrived;
  Search<K>* searches;
};

// What to note at the first digit, where it is asked for.
template <class K> struct Noted {
  int64_t* nonfinite = nullptr;
  const Search<K>* floors = nullptr;  // of the candidates
  const int64_t* found = nullptr;     // how many these are
  int64_t room = 0;
  int64_t* wanting = nullptr;  // becomes 1 if the k largest are not among them
};

// Of a side whose candidates begin at a key there have to be k; 0 lets all pass.
template <class K> __device__ void note_want(const Noted<K>& noted, const Digit<K>& digit, int side, int64_t total) {
  if (!noted.wanting) return;
  const bool enough = noted.floors[side].key == 0 || total >= digit.k;
  if (!enough || *noted.found > noted.room) *noted.wanting = 1;
}

// The last block of a grid chooses the digit of each side.
template <int kSides, class K> __device__ void choose(const Digit<K>& digit, const Noted<K>& noted) {
  for (int side = 0; side < kSides; ++side) {
    Search<K> s = digit.above == kKeyBits<K> ? Search<K>{0, digit.k, false} : digit.searches[side];
    const Ranked ranked = bin_of_rank<kBins>(digit.counts + side * kBins, s.rank);
    if (threadIdx.x != 0 || s.whole) continue;
    const bool first = digit.above == kKeyBits<K>;
    if (first) note_want(noted, digit, side, ranked.total);
    if (first && ranked.total <= s.rank)
      digit.searches[side] = {0, 0, true};
    else
      digit.searches[side] = {K(s.key | K(ranked.bin) << digit.shift), ranked.rank, false};
  }
}

// Counts a digit of the keys that agree with the search so far.
template <int kSides, class Source, class K>
__global__ void digits_kernel(Source source, Digit<K> digit, Noted<K> noted) {
  __shared__ unsigned counts[kSides * kBins];
  for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) counts[i] = 0;
  __syncthreads();
  const bool first = digit.above == kKeyBits<K>;
  const K above = first ? K(0) : K(~K(0) << digit.above);
  K known[kSides];
  for (int side = 0; side < kSides; ++side) known[side] = first ? K(0) : digit.searches[side].key & above;
  int64_t bad = 0;
  for (int64_t i = first_item(); i < source.size(); i += item_stride()) {
    const auto given = source.value(i), x = less_nan(given);
    bad += !is_finite(given);
    const K key = key_of(x);
    const int side = side_of<kSides>(x);
    const K wanted = kSides == 1 || side == 0 ? known[0] : known[kSides - 1];
    if (key != 0 && (key & above) == wanted)
      atomicAdd(&counts[side * kBins + int(key >> digit.shift & (kBins - 1))], 1u);
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) add_count(digit.counts + i, counts[i]);
  if (noted.nonfinite) add_count(noted.nonfinite, bad);
  if (is_last_block(digit.arrived)) choose<kSides>(digit, noted);
}

// Memory for the counts of so many digits, cleared at once.
template <int kSides> class Counters {
 public:
  Counters(int digits, Launch launch) : memory_(digits * kEach, launch) {
    clear(memory_.get(), digits * kEach * int64_t(sizeof(int64_t)), launch);
  }
  int64_t* of(int digit) const { return memory_.get() + digit * kEach; }
  unsigned* arrived(int digit) const { return reinterpret_cast<unsigned*>(of(digit) + kSides * kBins); }

 private:
  static constexpr int64_t kEach = kSides * kBins + 1;
  Scratch<int64_t> memory_;
};

// Blocks enough to keep a GPU busy, and few enough that adding up their bins takes no time.
inline int64_t items_for(int64_t count) { return std::min<int64_t>(count, 1 << 17); }

// Finds the first `digits` digits of the k-th largest key of each side, in at most `size` keys of a source.
template <int kSides, class Source, class K> void find_digits(const Source& source, int64_t size, int64_t k, int digits,
                                                              Search<K>* searches, const Noted<K>& noted,
                                                              Launch launch) {
  const Counters<kSides> counters(digits, launch);
  int above = kKeyBits<K>;
  for (int number = 0; number < digits; ++number) {
    const int shift = std::max(above - kDigitBits, 0);
    const Digit<K> digit{shift, above, k, counters.of(number), counters.arrived(number), searches};
    start(digits_kernel<kSides, Source, K>, items_for(size), launch, source, digit, number == 0 ? noted : Noted<K>{});
    above = shift;
  }
}

// ---- candidates ---------------------------------------------------------------------------------------------
// One pass marks them, 32 elements in a word, and counts them by chunks of 1024; the other one gathers what is marked.

// The marks of a lane's group, and what is not finite.
struct Marks {
  uint32_t bits = 0;
  int bad = 0;
};

template <int kSides, bool kWhole, class T> __device__ void mark_groups(const Input<T>& in,
                                                                        const Key<Work<T>> (&floors)[kSides],
                                                                        int64_t begin, int first, Marks& marks) {
  using W = Work<T>;
  const int64_t at = begin + first * kWarp + lane_index(), left = in.count - at;
  T given[kGroups];
  W x[kGroups];
  load_offered<kWhole>(in.grad, in.residual, at, left, given, x);
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    x[k] = to_work(given[k]) + x[k];
    const W kept = less_nan(x[k]);
    const Key<W> key = key_of(kept);
    const bool passes = key != 0 && key >= (side_of<kSides>(kept) == 0 ? floors[0] : floors[kSides - 1]);
    const uint32_t bits = __ballot_sync(kAllLanes, passes);
    marks.bits = lane_index() == first + k ? bits : marks.bits;
    marks.bad += !is_finite(x[k]);
  }
}

template <int kSides, class T> __global__ void mark_kernel(Input<T> in, const Search<Key<Work<T>>>* searches,
                                                           int64_t chunks, uint32_t* marked, int64_t* counts,
                                                           int64_t* nonfinite) {
  Key<Work<T>> floors[kSides];
  for (int side = 0; side < kSides; ++side) floors[side] = searches[side].key;
  for (int64_t chunk = first_warp(); chunk < chunks; chunk += warp_stride()) {
    const int64_t begin = chunk * kChunk;
    Marks marks;
    for (int first = 0; first < kChunk / kWarp; first += kGroups) {
      if (begin + kChunk <= in.count)
        mark_groups<kSides, true>(in, floors, begin, first, marks);
      else
        mark_groups<kSides, false>(in, floors, begin, first, marks);
    }
    marked[chunk * kWarp + lane_index()] = marks.bits;
    const int count = combine_warp(__popc(marks.bits));
    add_count(nonfinite, marks.bad);
    if (lane_index() != 0) continue;
    counts[chunk] = count;
    if (chunk == 0) counts[chunks] = 0;  // what is added up ends with the sum of all
  }
}

// `before` holds the counts of all chunks before each. What finds no room is dropped.
template <class T> __global__ void gather_kernel(Input<T> in, int64_t chunks, const uint32_t* marked,
                                                 const int64_t* before, Candidate<Work<T>>* list, int64_t room) {
  for (int64_t chunk = first_warp(); chunk < chunks; chunk += warp_stride()) {
    uint32_t bits = marked[chunk * kWarp + lane_index()];
    int all;
    int64_t place = before[chunk] + sum_before(__popc(bits), all);
    for (; bits != 0 && place < room; bits &= bits - 1, ++place) {
      const int64_t i = chunk * kChunk + lane_index() * kWarp + __ffs(int(bits)) - 1;
      list[place] = {offered(in.grad, in.residual, i), int32_t(i)};
    }
  }
}

// The candidates of an input: what reaches the floor of its side. `before` has room for a number more than chunks.
template <int kSides, class T> void find_candidates(const Input<T>& in, const Search<Key<Work<T>>>* floors,
                                                    const Few<Work<T>>& few, int64_t* before, int64_t* nonfinite,
                                                    Launch launch) {
  const int64_t chunks = ceil_div(in.count, kChunk);
  const Scratch<uint32_t> marked(chunks * kWarp, launch);
  start(mark_kernel<kSides, T>, chunks * kWarp, launch, in, floors, chunks, marked.get(), before, nonfinite);
  prefix_sums(before, before, chunks + 1, launch);
  start(gather_kernel<T>, chunks * kWarp, launch, in, chunks, marked.get(), before, few.list, few.room);
}

}  // namespace
}  // namespace hvc
