// Exact selection of the largest elements: the cut of each side digit by digit, then what passes it, in order. Where a
// sample says about where the cuts will be, one pass takes what may pass, and the cuts are searched among these.
#include "cuts.h"
#include "visit.h"

namespace hvc {
namespace {

// What remains on one side, in index order.
template <class W> struct Kept {
  int32_t* positions;
  W* values;
};

// ---- kernels ----------------------------------------------------------------------------------------------

// So many times 32 keys are loaded at once.
constexpr int kAtOnce = 4;

// Calls use(i, value) for the keys of a chunk that a lane has, and zeros behind the end: all lanes call it alike.
template <class Source, class Use> __device__ void each_of_chunk(const Source& source, int64_t chunk, const Use& use) {
  const int64_t end = min((chunk + 1) * Source::kChunk, source.size());
  for (int64_t first = chunk * Source::kChunk; first < end; first += kAtOnce * kWarp) {
    typename Source::W x[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t i = first + k * kWarp + lane_index();
      x[k] = i < end ? less_nan(source.value(i)) : typename Source::W(0);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) use(first + k * kWarp + lane_index(), x[k]);
  }
}

// Counts, in every chunk, the keys above the cut of each side, then those that equal it.
template <int kSides, class Source, class K>
__global__ void tally_kernel(Source source, const Search<K>* searches, int64_t chunks, int64_t* tallies) {
  for (int64_t chunk = first_warp(); chunk < chunks; chunk += warp_stride()) {
    int counts[2 * kSides] = {};
    each_of_chunk(source, chunk, [&](int64_t, typename Source::W x) {
      const K key = key_of(x);
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
        const bool mine = key != 0 && side_of<kSides>(x) == side;
        counts[2 * side] += __popc(__ballot_sync(kAllLanes, mine && key > searches[side].key));
        counts[2 * side + 1] += __popc(__ballot_sync(kAllLanes, mine && key == searches[side].key));
      }
    });
    if (lane_index() != 0) continue;
    for (int kind = 0; kind < 2 * kSides; ++kind) tallies[kind * chunks + chunk] = counts[kind];
    if (chunk == 0) tallies[2 * kSides * chunks] = 0;  // what is added up ends with the sum of all
  }
}

// How many a side keeps. `before` holds the tallies of all chunks before each, one kind after the other.
template <class K>
__device__ int64_t size_of(const Search<K>* searches, int side, int64_t chunks, const int64_t* before) {
  const int64_t *larger = before + 2 * side * chunks, *equal = larger + chunks;
  return equal[0] - larger[0] + min(equal[chunks] - equal[0], searches[side].rank);
}

// Writes what a chunk has of a side, at its place.
template <int kSides, class Source, class K>
__device__ void compact_chunk(const Source& source, const Search<K>& cut, int side, int64_t chunk, int64_t above,
                              int64_t ties, Kept<typename Source::W> kept) {
  using W = typename Source::W;
  const unsigned lower = (1u << lane_index()) - 1;
  each_of_chunk(source, chunk, [&](int64_t i, W x) {
    const K key = key_of(x);
    const bool mine = key != 0 && side_of<kSides>(x) == side;
    const unsigned is_above = __ballot_sync(kAllLanes, mine && key > cut.key);
    const unsigned is_tie = __ballot_sync(kAllLanes, mine && key == cut.key);
    const int64_t tie = ties + __popc(is_tie & lower);
    const int64_t place = above + __popc(is_above & lower) + min(tie, cut.rank);
    if (mine && (key > cut.key || (key == cut.key && tie < cut.rank))) {
      kept.positions[place] = source.position(i);
      kept.values[place] = x;
    }
    above += __popc(is_above);
    ties += __popc(is_tie);
  });
}

template <int kSides, class Source, class K>
__global__ void compact_kernel(Source source, const Search<K>* searches, int64_t chunks, const int64_t* before,
                               Kept<typename Source::W> first_side, Kept<typename Source::W> second_side,
                               int64_t* sizes) {
  if (first_item() < kSides) sizes[first_item()] = size_of(searches, int(first_item()), chunks, before);
  for (int64_t chunk = first_warp(); chunk < chunks; chunk += warp_stride())
    for (int side = 0; side < kSides; ++side) {
      const int64_t *larger = before + 2 * side * chunks, *equal = larger + chunks;
      const int64_t above = larger[chunk] - larger[0], ties = equal[chunk] - equal[0];
      const Kept<typename Source::W> kept{side == 0 ? first_side.positions : second_side.positions,
                                          side == 0 ? first_side.values : second_side.values};
      compact_chunk<kSides>(source, searches[side], side, chunk, above, ties, kept);
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

// Afterwards sizes[0] is what the winner keeps, sizes[1] which side that is.
template <class W>
__global__ void winner_kernel(const double* sums, int64_t blocks, int64_t* sizes, W* mean, int64_t* kept) {
  const double positive = sum_of_blocks(sums, sizes[0]), negative = sum_of_blocks(sums + blocks, sizes[1]);
  const int side = negatives_win(positive, sizes[0], -negative, sizes[1]);
  const double sum = side ? negative : positive;
  *mean = sizes[side] == 0 ? W(0) : W(sum / double(sizes[side]));
  *kept = sizes[0] = sizes[side];
  sizes[1] = side;
}

__global__ void copy_kernel(const int32_t* positive, const int32_t* negative, const int64_t* sizes, int32_t* out) {
  const int32_t* winner = sizes[1] ? negative : positive;
  for (int64_t i = first_item(); i < sizes[0]; i += item_stride()) out[i] = winner[i];
}

// ---- launchers --------------------------------------------------------------------------------------------

// Writes what each side keeps of a source with at most `size` keys, where the digits before `first` have been found,
// and how many: sizes[side], which begin with 0.
template <int kSides, class Source, class K>
void select_from(const Source& source, int64_t size, const Digits<kSides, K>& digits, int first, const Noted<K>& noted,
                 Kept<typename Source::W> first_side, Kept<typename Source::W> second_side, int64_t* sizes,
                 Launch launch) {
  const int64_t chunks = ceil_div(size, Source::kChunk), kinds = 2 * kSides * chunks;
  const Scratch<int64_t> tallies(kinds + 1, launch), before(kinds + 1, launch);
  for (int number = first; number < kDigits<K>; ++number)
    find_digit<kSides>(source, size, digits.of(number), number == 0 ? noted : Noted<K>{}, launch);
  const Search<K>* const searches = digits.searches();
  start(tally_kernel<kSides, Source, K>, chunks * kWarp, launch, source, searches, chunks, tallies.get());
  prefix_sums(tallies.get(), before.get(), kinds + 1, launch);
  start(compact_kernel<kSides, Source, K>, chunks * kWarp, launch, source, searches, chunks, before.get(), first_side,
        second_side, sizes);
}

// Elements of a sample. The tests make it small, so that short tensors are sampled.
#ifndef HVC_SAMPLE
#define HVC_SAMPLE (1 << 16)
#endif
constexpr int64_t kSample = HVC_SAMPLE;

// Where a sample pays, and how many candidates there is room for. Two digits of a cut leave the sample's own error: a
// fifth more candidates than are kept, most of the time.
bool is_sampled(int64_t count, int64_t k) { return count >= 4 * kSample && k <= count / 16 && count <= INT32_MAX; }
template <int kSides> int64_t room_for(int64_t k) { return kSides * (3 * k + kSample / 16); }
constexpr int kDigitsOfFloor = 2;

// The rank in a sample of some size that the k-th largest of all has, and some more: it falls short once in 30,000
// times.
int64_t rank_in_sample(int64_t size, int64_t count, int64_t k) {
  const double expected = double(k) * double(size) / double(count);
  return int64_t(expected + 4 * std::sqrt(expected) + 8);
}

// What a selection finds out: counts for the host, and whether a sample has misled, as where a cut goes through very
// many equal elements.
struct Results {
  int64_t *nonfinite, *wanting, *sizes;
};

// Finds, in a sample, a key that about all that are kept will reach.
template <int kSides, class T, class K>
void find_floors(const Input<T>& in, int64_t* counts, Search<K>* floors, Launch launch) {
  const int64_t step = in.count / kSample, size = in.count / step;
  const Scratch<Work<T>> values(size, launch);
  const Digits<kSides, K> digits(rank_in_sample(size, in.count, in.k), counts, floors);
  find_digit<kSides>(Sampled<T>{in, step, values.get()}, size, digits.of(0), Noted<K>{}, launch);
  for (int number = 1; number < kDigitsOfFloor; ++number)
    find_digit<kSides>(Sample<Work<T>>{values.get(), size}, size, digits.of(number), Noted<K>{}, launch);
}

// Writes what each side keeps, and how many; notes if the candidates were not enough.
template <int kSides, class T> void select_sampled(const Input<T>& in, Kept<Work<T>> first_side,
                                                   Kept<Work<T>> second_side, const Results& results, Launch launch) {
  using W = Work<T>;
  using K = Key<W>;
  const int64_t room = room_for<kSides>(in.k), chunks = ceil_div(in.count, kChunk);
  const Scratch<Search<K>> floors(kSides, launch), searches(kSides, launch);
  const Scratch<Candidate<W>> list(room, launch);
  const Scratch<int64_t> before(chunks + 1, launch);  // ends with how many were found
  const Counts<kSides> counts(kDigitsOfFloor + kDigits<K>, launch);
  find_floors<kSides>(in, counts.of(0), floors.get(), launch);
  const int64_t* const found = before.get() + chunks;
  const Few<W> few{list.get(), found, room};
  const Noted<K> noted{nullptr, floors.get(), found, room, results.wanting};
  const Digits<kSides, K> digits(in.k, counts.of(kDigitsOfFloor), searches.get());
  find_candidates<kSides>(in, floors.get(), few, before.get(), results.nonfinite, digits.of(0), noted, launch);
  select_from<kSides>(few, room, digits, 1, noted, first_side, second_side, results.sizes, launch);
}

template <int kSides, class T> void select_largest(const Input<T>& in, bool sampled, Kept<Work<T>> first_side,
                                                   Kept<Work<T>> second_side, const Results& results, Launch launch) {
  using K = Key<Work<T>>;
  if (in.count == 0) return;
  if (sampled) return select_sampled<kSides>(in, first_side, second_side, results, launch);
  const Scratch<Search<K>> searches(kSides, launch);
  const Counts<kSides> counts(kDigits<K>, launch);
  const Digits<kSides, K> digits(in.k, counts.of(0), searches.get());
  select_from<kSides>(Whole<T>{in}, in.count, digits, 0, Noted<K>{results.nonfinite}, first_side, second_side,
                      results.sizes, launch);
}

// Clears the numbers of a selection, and the sizes of its sides; says where a search of these sides is to note what.
Results cleared(int64_t* numbers, int64_t* sizes, int sides, Launch launch) {
  clear(numbers, kSelected * sizeof *numbers, launch);
  if (sizes != numbers) clear(sizes, sides * int64_t(sizeof *sizes), launch);
  return {numbers + 1, numbers + 2, sizes};
}

}  // namespace

void top_select(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t k, int32_t* positions,
                void* values, int64_t* numbers, bool whole, Launch launch) {
  const Results results = cleared(numbers, numbers, kTogether, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Kept<Work<T>> kept{positions, static_cast<Work<T>*>(values)};
    const bool sampled = !whole && is_sampled(count, k);
    select_largest<kTogether>(input<T>(grad, residual, count, k), sampled, kept, kept, results, launch);
  });
}

void binary_select(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t k, int32_t* positions,
                   void* mean, int64_t* numbers, bool whole, Launch launch) {
  const int64_t blocks = ceil_div(k, kBlock);
  const Scratch<int32_t> chosen(2 * k, launch);
  const Scratch<double> sums(2 * blocks, launch);
  const Scratch<int64_t> sizes(kApart, launch);
  const Results results = cleared(numbers, sizes.get(), kApart, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Scratch<W> values(2 * k, launch);
    const Kept<W> positive{chosen.get(), values.get()}, negative{chosen.get() + k, values.get() + k};
    const bool sampled = !whole && is_sampled(count, k);
    select_largest<kApart>(input<T>(grad, residual, count, k), sampled, positive, negative, results, launch);
    start(sums_kernel<W>, 2 * blocks * kWarp, launch, positive, negative, results.sizes, blocks, sums.get());
    start_blocks(winner_kernel<W>, 1, 1, launch, sums.get(), blocks, results.sizes, static_cast<W*>(mean), numbers);
    start(copy_kernel, k, launch, positive.positions, negative.positions, results.sizes, positions);
  });
}

}  // namespace hvc
