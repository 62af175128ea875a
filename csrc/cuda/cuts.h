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

// Every `step`-th element. They lie far apart: what is found of them is kept for the digits after the first.
template <class T> struct Sampled {
  using W = Work<T>;
  Input<T> in;
  int64_t step;
  W* kept;
  __device__ int64_t size() const { return in.count / step; }
  __device__ W value(int64_t i) const { return kept[i] = offered(in.grad, in.residual, i * step); }
};
template <class V> struct Sample {
  using W = V;
  const V* values;
  int64_t count;
  __device__ int64_t size() const { return count; }
  __device__ V value(int64_t i) const { return values[i]; }
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

// The bins of a block in shared memory: they begin empty, and are added to those of the grid at the end.
template <int kSides> struct Bins {
  unsigned counts[kSides * kBins];

  __device__ void begin() {
    for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) counts[i] = 0;
    __syncthreads();
  }
  template <class W> __device__ void take(W x, int shift) {
    atomicAdd(&counts[side_of<kSides>(x) * kBins + int(key_of(x) >> shift & (kBins - 1))], 1u);
  }
  template <class K> __device__ void end(const Digit<K>& digit, const Noted<K>& noted) {
    __syncthreads();
    for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) add_count(digit.counts + i, counts[i]);
    if (is_last_block(digit.arrived)) choose<kSides>(digit, noted);
  }
};

// Counts a digit of the keys that agree with the search so far.
template <int kSides, class Source, class K>
__global__ void digits_kernel(Source source, Digit<K> digit, Noted<K> noted) {
  using W = typename Source::W;
  __shared__ Bins<kSides> bins;
  bins.begin();
  const bool first = digit.above == kKeyBits<K>;
  const K above = first ? K(0) : K(~K(0) << digit.above);
  K known[kSides];
  for (int side = 0; side < kSides; ++side) known[side] = first ? K(0) : digit.searches[side].key & above;
  const int64_t size = source.size();
  int64_t bad = 0;
  for (int64_t begin = first_item(); begin < size; begin += kInFlight * item_stride()) {
    W given[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = begin + k * item_stride();
      given[k] = i < size ? source.value(i) : W(0);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const W x = less_nan(given[k]);
      bad += !is_finite(given[k]);
      const K key = key_of(x), wanted = side_of<kSides>(x) == 0 ? known[0] : known[kSides - 1];
      if (key != 0 && (key & above) == wanted) bins.take(x, digit.shift);
    }
  }
  if (noted.nonfinite) add_count(noted.nonfinite, bad);
  bins.end(digit, noted);
}

// Memory for the counts of so many digits, cleared at once.
template <int kSides> class Counts {
 public:
  static constexpr int64_t kEach = kSides * kBins + 1;
  Counts(int digits, Launch launch) : memory_(digits * kEach, launch) {
    clear(memory_.get(), digits * kEach * int64_t(sizeof(int64_t)), launch);
  }
  int64_t* of(int digit) const { return memory_.get() + digit * kEach; }

 private:
  Scratch<int64_t> memory_;
};

// The digits of a search for the k-th largest.
template <int kSides, class K> class Digits {
 public:
  Digits(int64_t k, int64_t* counts, Search<K>* searches) : k_(k), counts_(counts), searches_(searches) {}
  Digit<K> of(int number) const {
    const int above = kKeyBits<K> - number * kDigitBits;
    int64_t* const counts = counts_ + number * Counts<kSides>::kEach;
    auto* const arrived = reinterpret_cast<unsigned*>(counts + kSides * kBins);
    return {std::max(above - kDigitBits, 0), above, k_, counts, arrived, searches_};
  }
  Search<K>* searches() const { return searches_; }

 private:
  int64_t k_, *counts_;
  Search<K>* searches_;
};

// Blocks enough to keep a GPU busy, and few enough that adding up their bins takes no time.
inline int64_t items_for(int64_t count) { return std::min<int64_t>(count, 1 << 17); }

// Finds a digit of the k-th largest key of each side, in at most `size` keys of a source.
template <int kSides, class Source, class K>
void find_digit(const Source& source, int64_t size, const Digit<K>& digit, const Noted<K>& noted, Launch launch) {
  start(digits_kernel<kSides, Source, K>, items_for(size), launch, source, digit, noted);
}

// ---- candidates ---------------------------------------------------------------------------------------------
// One pass finds them, counts them by chunks of 1024 elements, and puts those of a chunk into its slot. Once all are
// counted, they move to their places; of a chunk that has more than its slot holds, they are found once more.

constexpr int kSlot = 64, kLanesOfChunk = 8;

// What reaches the floor of its side.
template <int kSides, class W> struct Floors {
  Key<W> keys[kSides];

  __device__ explicit Floors(const Search<Key<W>>* searches) {
    for (int side = 0; side < kSides; ++side) keys[side] = searches[side].key;
  }
  __device__ bool pass(W kept) const {
    const Key<W> key = key_of(kept);
    return key != 0 && key >= (side_of<kSides>(kept) == 0 ? keys[0] : keys[kSides - 1]);
  }
};

// Calls put(number, candidate) for the candidates of some groups of a chunk that a lane has, where so many came before;
// counts what is not finite.
template <int kSides, bool kWhole, class T, class Put>
__device__ void search_groups(const Input<T>& in, const Floors<kSides, Work<T>>& floors, int64_t first, int& before,
                              int& bad, const Put& put) {
  using W = Work<T>;
  const int64_t at = first + lane_index(), left = in.count - at;
  const uint32_t lower = (1u << lane_index()) - 1;
  T given[kGroups];
  W x[kGroups];
  load_offered<kWhole>(in.grad, kept_array<W>(in.residual), at, left, given, x);
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    x[k] = to_work(given[k]) + x[k];
    bad += !is_finite(x[k]);
    const W kept = less_nan(x[k]);
    const bool passes = floors.pass(kept);
    const uint32_t bits = __ballot_sync(kAllLanes, passes);
    if (passes) put(before + __popc(bits & lower), Candidate<W>{kept, int32_t(at + k * kWarp)});
    before += __popc(bits);
  }
}

// The same for a chunk; returns how many candidates it has.
template <int kSides, class T, class Put> __device__ int search_chunk(const Input<T>& in,
                                                                      const Floors<kSides, Work<T>>& floors,
                                                                      int64_t chunk, int& bad, const Put& put) {
  int found = 0;
  const int64_t begin = chunk * kChunk;
#pragma unroll 1
  for (int64_t first = begin; first < begin + kChunk; first += kGroups * kWarp) {
    if (begin + kChunk <= in.count)
      search_groups<kSides, true>(in, floors, first, found, bad, put);
    else
      search_groups<kSides, false>(in, floors, first, found, bad, put);
  }
  return found;
}

template <int kSides, class T> __global__ void mark_kernel(Input<T> in, const Search<Key<Work<T>>>* searches,
                                                           int64_t chunks, Candidate<Work<T>>* slots, int64_t* counts,
                                                           int64_t* nonfinite) {
  using W = Work<T>;
  const Floors<kSides, W> floors(searches);
  for (int64_t chunk = first_warp(); chunk < chunks; chunk += warp_stride()) {
    Candidate<W>* const slot = slots + chunk * kSlot;
    int bad = 0;
    const int count = search_chunk(in, floors, chunk, bad, [&](int number, const Candidate<W>& candidate) {
      if (number < kSlot) slot[number] = candidate;
    });
    add_count(nonfinite, bad);
    if (lane_index() != 0) continue;
    counts[chunk] = count;
    if (chunk == 0) counts[chunks] = 0;  // what is added up ends with the sum of all
  }
}

// Puts the candidates into a list, where those that find no room are dropped, and counts the first digit of these.
template <int kSides, class T> __global__ void gather_kernel(Input<T> in, const Search<Key<Work<T>>>* searches,
                                                             int64_t chunks, const Candidate<Work<T>>* slots,
                                                             const int64_t* before, Few<Work<T>> few,
                                                             Digit<Key<Work<T>>> digit, Noted<Key<Work<T>>> noted) {
  using W = Work<T>;
  constexpr int kAtOnce = kWarp / kLanesOfChunk;
  __shared__ Bins<kSides> bins;
  bins.begin();
  const auto put = [&](int64_t place, const Candidate<W>& candidate) {
    if (place >= few.room) return;
    few.list[place] = candidate;
    bins.take(candidate.value, digit.shift);
  };
  for (int64_t first = first_warp() * kAtOnce; first < chunks; first += warp_stride() * kAtOnce) {
    const int64_t chunk = min(first + lane_index() / kLanesOfChunk, chunks - 1), begin = before[chunk];
    const int count = first + lane_index() / kLanesOfChunk < chunks ? int(before[chunk + 1] - begin) : 0;
    if (count <= kSlot) {
      for (int i = lane_index() % kLanesOfChunk; i < count; i += kLanesOfChunk)
        put(begin + i, slots[chunk * kSlot + i]);
    }
    for (unsigned full = __ballot_sync(kAllLanes, count > kSlot); full != 0;) {
      const int lane = __ffs(int(full)) - 1;
      const int64_t its_begin = __shfl_sync(kAllLanes, begin, lane);
      int bad = 0;
      search_chunk(in, Floors<kSides, W>(searches), first + lane / kLanesOfChunk, bad,
                   [&](int number, const Candidate<W>& candidate) { put(its_begin + number, candidate); });
      full &= ~(((1u << kLanesOfChunk) - 1) << lane);
    }
  }
  bins.end(digit, noted);
}

// The candidates of an input: what reaches the floor of its side, and the first digit of a search among these. `before`
// has room for a number more than chunks.
template <int kSides, class T> void find_candidates(const Input<T>& in, const Search<Key<Work<T>>>* floors,
                                                    const Few<Work<T>>& few, int64_t* before, int64_t* nonfinite,
                                                    const Digit<Key<Work<T>>>& digit, const Noted<Key<Work<T>>>& noted,
                                                    Launch launch) {
  const int64_t chunks = ceil_div(in.count, kChunk);
  const Scratch<Candidate<Work<T>>> slots(chunks * kSlot, launch);
  start(mark_kernel<kSides, T>, chunks * kWarp, launch, in, floors, chunks, slots.get(), before, nonfinite);
  prefix_sums(before, before, chunks + 1, launch);
  start(gather_kernel<kSides, T>, items_for(chunks * kLanesOfChunk), launch, in, floors, chunks,
        static_cast<const Candidate<Work<T>>*>(slots.get()), static_cast<const int64_t*>(before), few, digit, noted);
}

}  // namespace
}  // namespace hvc
