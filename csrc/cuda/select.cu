// Exact selection of the largest elements: the cut of each side digit by digit, then what passes it, in order.
#include "rules/select.h"

#include "rules/tree.h"
#include "rows.h"
#include "scan.h"
#include "select_operands.h"
#include "visit.h"

namespace hvc {
namespace {

// A zero stands for NaN: neither is ever kept.
template <class W> __device__ W less_nan(W x) { return x > 0 || x < 0 ? x : W(0); }
template <class T> __device__ Work<T> value_at(const Input<T>& in, int64_t i) {
  return less_nan(offered(in.grad, in.residual, i));
}

constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;
constexpr int64_t kChunk = 1024;  // elements that a warp compacts

// What is known of the k-th largest key of a side: its digits so far, and which of the keys with these digits it is.
// `whole` says that all keys are kept.
template <class K> struct Search {
  K key;
  int64_t rank;
  bool whole;
};

// What remains on one side, in index order.
template <class W> struct Kept {
  int32_t* positions;
  W* values;
};

// ---- kernels ----------------------------------------------------------------------------------------------

template <class K> __global__ void begin_kernel(Search<K>* searches, int64_t k) {
  searches[threadIdx.x] = {0, k, false};
}

// Counts the next digit of keys that agree with the search so far, and, where that is asked for, what is not finite.
template <int kSides, class T> __global__ void digits_kernel(Input<T> in, const Search<Key<Work<T>>>* searches,
                                                             int shift, int64_t* counts, int64_t* nonfinite) {
  using K = Key<Work<T>>;
  __shared__ unsigned found[kSides * kBins];
  for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) found[i] = 0;
  __syncthreads();
  int64_t bad = 0;
  for (int64_t i = first_item(); i < in.count; i += item_stride()) {
    const Work<T> given = offered(in.grad, in.residual, i), x = less_nan(given);
    bad += !is_finite(given);
    const K key = key_of(x);
    const int side = side_of<kSides>(x);
    const K above = K(~uint64_t(0) << shift << kDigitBits);
    if (key != 0 && (key & above) == (searches[side].key & above))
      atomicAdd(&found[side * kBins + int(key >> shift & (kBins - 1))], 1u);
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) add_count(counts + i, found[i]);
  if (nonfinite) add_count(nonfinite, bad);
}

template <class K> __global__ void choose_kernel(Search<K>* searches, int shift, const int64_t* counts) {
  Search<K>& s = searches[threadIdx.x];
  const int64_t* mine = counts + int64_t(threadIdx.x) * kBins;
  if (s.whole) return;
  int64_t total = 0;
  for (int digit = 0; digit < kBins; ++digit) total += mine[digit];
  if (total <= s.rank && shift + kDigitBits == int(8 * sizeof(K))) {
    s = {0, 0, true};
    return;
  }
  int digit = kBins - 1;
  for (; digit > 0 && s.rank > mine[digit]; --digit) s.rank -= mine[digit];
  s.key |= K(K(digit) << shift);
}

// Counts, in every chunk, the keys above the cut of each side, then those that equal it.
template <int kSides, class T>
__global__ void tally_kernel(Input<T> in, const Search<Key<Work<T>>>* searches, int64_t chunks, int64_t* tallies) {
  for (int64_t chunk = first_warp(); chunk < chunks; chunk += warp_stride()) {
    int64_t counts[2 * kSides] = {};
    for (int64_t i = chunk * kChunk + lane_index(); i < (chunk + 1) * kChunk; i += kWarp) {
      const Work<T> x = i < in.count ? value_at(in, i) : Work<T>(0);
      const auto key = key_of(x);
      for (int side = 0; side < kSides; ++side) {
        const bool mine = key != 0 && side_of<kSides>(x) == side;
        counts[2 * side] += __popc(__ballot_sync(kAllLanes, mine && key > searches[side].key));
        counts[2 * side + 1] += __popc(__ballot_sync(kAllLanes, mine && key == searches[side].key));
      }
    }
    if (lane_index() == 0)
      for (int kind = 0; kind < 2 * kSides; ++kind) tallies[kind * chunks + chunk] = counts[kind];
  }
}

// `before` holds the tallies of all chunks before each, one kind after the other.
template <int kSides, class T> __global__ void compact_kernel(Input<T> in, const Search<Key<Work<T>>>* searches,
                                                              int64_t chunks, const int64_t* before,
                                                              Kept<Work<T>> first_side, Kept<Work<T>> second_side) {
  const unsigned lower = (1u << lane_index()) - 1;
  for (int64_t chunk = first_warp(); chunk < chunks; chunk += warp_stride()) {
    for (int side = 0; side < kSides; ++side) {
      int32_t* const positions = side == 0 ? first_side.positions : second_side.positions;
      Work<T>* const values = side == 0 ? first_side.values : second_side.values;
      const int64_t *larger = before + 2 * side * chunks, *equal = larger + chunks;
      const auto cut = searches[side];
      int64_t above = larger[chunk] - larger[0], ties = equal[chunk] - equal[0];
      for (int64_t i = chunk * kChunk + lane_index(); i < (chunk + 1) * kChunk; i += kWarp) {
        const Work<T> x = i < in.count ? value_at(in, i) : Work<T>(0);
        const auto key = key_of(x);
        const bool mine = key != 0 && side_of<kSides>(x) == side;
        const unsigned is_above = __ballot_sync(kAllLanes, mine && key > cut.key);
        const unsigned is_tie = __ballot_sync(kAllLanes, mine && key == cut.key);
        const int64_t tie = ties + __popc(is_tie & lower);
        const int64_t place = above + __popc(is_above & lower) + min(tie, cut.rank);
        if (mine && (key > cut.key || (key == cut.key && tie < cut.rank))) {
          positions[place] = int32_t(i);
          values[place] = x;
        }
        above += __popc(is_above);
        ties += __popc(is_tie);
      }
    }
  }
}

// How many each side keeps: `before` ends with the sum over all kinds.
template <class K> __global__ void sizes_kernel(const Search<K>* searches, int sides, int64_t chunks,
                                                const int64_t* before, int64_t* sizes) {
  for (int side = 0; side < sides; ++side) {
    const int64_t *larger = before + 2 * side * chunks, *equal = larger + chunks;
    sizes[side] = equal[0] - larger[0] + min(equal[chunks] - equal[0], searches[side].rank);
  }
}

// The order of rules/tree.h: a warp adds a block of one side.
template <class W>
__global__ void sums_kernel(Kept<W> positive, Kept<W> negative, const int64_t* sizes, int64_t blocks, double* sums) {
  for (int64_t item = first_warp(); item < 2 * blocks; item += warp_stride()) {
    const int side = item >= blocks;
    const W* values = side ? negative.values : positive.values;
    const int64_t begin = item % blocks * kBlock, end = min(begin + kBlock, sizes[side]);
    double sum = 0;
    for (int64_t i = begin + lane_index(); i < end; i += kWarp) sum += double(values[i]);
    for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_down_sync(kAllLanes, sum, half);
    if (lane_index() == 0) sums[item] = sum;
  }
}

__device__ inline double sum_of_blocks(const double* sums, int64_t size) {
  constexpr int64_t kBlocks = kSuperblock / kBlock;
  const int64_t blocks = ceil_div(size, kBlock);
  double total = 0;
  for (int64_t first = 0; first < blocks; first += kBlocks) {
    double sum = 0;
    for (int64_t block = first; block < min(first + kBlocks, blocks); ++block) sum += sums[block];
    total += sum;
  }
  return total;
}

// found[0] is what the winner keeps, found[2] which side that is; found[1] is the count of what is not finite.
template <class W>
__global__ void winner_kernel(const double* sums, int64_t blocks, const int64_t* sizes, W* mean, int64_t* found) {
  const double positive = sum_of_blocks(sums, sizes[0]), negative = sum_of_blocks(sums + blocks, sizes[1]);
  const int side = negatives_win(positive, sizes[0], -negative, sizes[1]);
  const double sum = side ? negative : positive;
  *mean = sizes[side] == 0 ? W(0) : W(sum / double(sizes[side]));
  found[0] = sizes[side];
  found[2] = side;
}

__global__ void copy_kernel(const int32_t* positive, const int32_t* negative, const int64_t* found, int32_t* out) {
  const int32_t* winner = found[2] ? negative : positive;
  for (int64_t i = first_item(); i < found[0]; i += item_stride()) out[i] = winner[i];
}

// ---- launchers --------------------------------------------------------------------------------------------

template <int kSides, class T>
void find_cuts(const Input<T>& in, Search<Key<Work<T>>>* searches, int64_t* nonfinite, Launch launch) {
  using K = Key<Work<T>>;
  const Scratch<int64_t> counts(kSides * kBins, launch);
  start_blocks(begin_kernel<K>, 1, kSides, launch, searches, in.k);
  for (int shift = int(8 * sizeof(K)) - kDigitBits; shift >= 0; shift -= kDigitBits) {
    clear(counts.get(), kSides * kBins * int64_t(sizeof(int64_t)), launch);
    start(digits_kernel<kSides, T>, std::min<int64_t>(in.count, 1 << 20), launch, in, searches, shift, counts.get(),
          shift + kDigitBits == int(8 * sizeof(K)) ? nonfinite : nullptr);
    start_blocks(choose_kernel<K>, 1, kSides, launch, searches, shift, counts.get());
  }
}

// Writes what each side keeps, and how many: sizes[side]. Adds to what is not finite.
template <int kSides, class T> void select_largest(const Input<T>& in, Kept<Work<T>> first_side,
                                                   Kept<Work<T>> second_side, int64_t* sizes, int64_t* nonfinite,
                                                   Launch launch) {
  using K = Key<Work<T>>;
  const int64_t chunks = ceil_div(in.count, kChunk), kinds = 2 * kSides * chunks;
  const Scratch<Search<K>> searches(kSides, launch);
  const Scratch<int64_t> tallies(kinds + 1, launch), before(kinds + 1, launch);
  find_cuts<kSides>(in, searches.get(), nonfinite, launch);
  clear(tallies.get() + kinds, sizeof(int64_t), launch);
  start(tally_kernel<kSides, T>, chunks * kWarp, launch, in, searches.get(), chunks, tallies.get());
  prefix_sums(tallies.get(), before.get(), kinds + 1, launch);
  start(compact_kernel<kSides, T>, chunks * kWarp, launch, in, searches.get(), chunks, before.get(), first_side,
        second_side);
  start_blocks(sizes_kernel<K>, 1, 1, launch, searches.get(), kSides, chunks, before.get(), sizes);
}

}  // namespace

Found top_select(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t k, int32_t* positions,
                 void* values, Launch launch) {
  const Scratch<int64_t> results(2, launch);
  clear(results.get(), 2 * sizeof(int64_t), launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto in = input<T>(grad, residual, count, k);
    const Kept<Work<T>> kept{positions, static_cast<Work<T>*>(values)};
    select_largest<kTogether>(in, kept, kept, results.get(), results.get() + 1, launch);
  });
  int64_t found[2];
  fetch(found, static_cast<const int64_t*>(results.get()), 2, launch);
  return {found[0], found[1]};
}

Found binary_select(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t k, int32_t* positions,
                    void* mean, Launch launch) {
  const int64_t blocks = ceil_div(k, kBlock);
  const Scratch<int64_t> results(3, launch), sizes(2, launch);
  const Scratch<int32_t> chosen(2 * k, launch);
  const Scratch<double> sums(2 * blocks, launch);
  clear(results.get(), 3 * sizeof(int64_t), launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Scratch<W> values(2 * k, launch);
    const auto in = input<T>(grad, residual, count, k);
    const Kept<W> positive{chosen.get(), values.get()}, negative{chosen.get() + k, values.get() + k};
    select_largest<kApart>(in, positive, negative, sizes.get(), results.get() + 1, launch);
    start(sums_kernel<W>, 2 * blocks * kWarp, launch, positive, negative, sizes.get(), blocks, sums.get());
    start_blocks(winner_kernel<W>, 1, 1, launch, sums.get(), blocks, sizes.get(), static_cast<W*>(mean), results.get());
    start(copy_kernel, k, launch, positive.positions, negative.positions, results.get(), positions);
  });
  int64_t found[2];
  fetch(found, static_cast<const int64_t*>(results.get()), 2, launch);
  return {found[0], found[1]};
}

}  // namespace hvc
