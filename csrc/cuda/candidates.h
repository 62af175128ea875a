// What may be among the k largest elements of one tensor, found in one pass.
#pragma once
#include "cuts.h"

namespace hvc {
namespace {

// One pass finds them, counts them by chunks of 1024 elements, and puts those of a chunk into its slot. Once all are
// counted, they move to their places; of a chunk that has more than its slot holds, they are found once more.

constexpr int64_t kChunk = 1024;
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
  bins.end(digit, gridDim.x, noted);
}

// Blocks enough to keep a GPU busy, and few enough that adding up their bins takes no time.
inline int64_t items_for(int64_t count) { return std::min<int64_t>(count, 1 << 17); }

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
