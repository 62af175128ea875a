// Exact selection of the largest elements: the cut of each side digit by digit, then what passes it, in order, of all
// tensors of a bucket at once. Where a sample says about where the cuts of a large one will be, one pass takes what may
// pass, and the cuts are searched among these.
#include <vector>

#include "candidates.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- what passes the cut ------------------------------------------------------------------------------------

// So many times 32 keys are loaded at once.
constexpr int kAtOnce = 4;

// Calls use(i, value) for the keys of a chunk that a lane has, and zeros past the end: all lanes call it alike.
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

// A chunk of a search, and where its tallies are: those of all chunks, one kind after the other, for every search.
template <int kSides> struct Place {
  int64_t chunk, chunks, before;

  template <class Table> __device__ Place(const Table& table, int item, int64_t unit)
      : chunk(kWarps * (unit - table.begins[item]) + threadIdx.x / kWarp),
        chunks(kWarps * (table.begins[item + 1] - table.begins[item])),
        before(2 * kSides * kWarps * table.begins[item]) {}
};

// Counts, in every chunk, the keys above the cut of each side, then those that equal it.
template <class Task, int kRoom> __global__ void tally_kernel(const __grid_constant__ Table<Task, kRoom> table,
                                                              const Search<typename Task::K>* found, int64_t* tallies) {
  constexpr int kSides = Task::sides;
  for (int64_t unit = blockIdx.x; unit < table.units(); unit += gridDim.x) {
    const int item = table.item_of(unit);
    const auto* const searches = found + item * kSides;
    const Place<kSides> place(table, item, unit);
    int counts[2 * kSides] = {};
    each_of_chunk(table.items[item].source, place.chunk, [&](int64_t, typename Task::W x) {
      const auto key = key_of(x);
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
        const bool mine = key != 0 && side_of<kSides>(x) == side;
        counts[2 * side] += __popc(__ballot_sync(kAllLanes, mine && key > searches[side].key));
        counts[2 * side + 1] += __popc(__ballot_sync(kAllLanes, mine && key == searches[side].key));
      }
    });
    if (lane_index() != 0) continue;
#pragma unroll
    for (int kind = 0; kind < 2 * kSides; ++kind)
      tallies[place.before + kind * place.chunks + place.chunk] = counts[kind];
  }
  // What is added up ends with the sum of all.
  if (first_item() == 0) tallies[2 * kSides * kWarps * table.units()] = 0;
}

// How many a side keeps. `larger` are the tallies of all chunks before each, after them those that equal the cut.
template <class K>
__device__ int64_t size_of_side(const Search<K>& cut, int64_t chunks, const int64_t* larger, const int64_t* equal) {
  return equal[0] - larger[0] + min(equal[chunks] - equal[0], cut.rank);
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

template <class Task, int kRoom> __global__ void compact_kernel(const __grid_constant__ Table<Task, kRoom> table,
                                                                const Search<typename Task::K>* found,
                                                                const int64_t* before) {
  constexpr int kSides = Task::sides;
  for (int64_t unit = blockIdx.x; unit < table.units(); unit += gridDim.x) {
    const int item = table.item_of(unit);
    const Task& task = table.items[item];
    const Place<kSides> place(table, item, unit);
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
      const auto& cut = found[item * kSides + side];
      const int64_t *larger = before + place.before + 2 * side * place.chunks, *equal = larger + place.chunks;
      if (place.chunk == 0 && lane_index() == 0) task.sizes[side] = size_of_side(cut, place.chunks, larger, equal);
      compact_chunk<kSides>(task.source, cut, side, place.chunk, larger[place.chunk] - larger[0],
                            equal[place.chunk] - equal[0], task.kept[side]);
    }
  }
}

// Writes what each side keeps in all searches of a table, whose digits before `first` have been found.
template <class Task, int kRoom> void select_in(const Table<Task, kRoom>& table,
                                                const Searches<Task::sides, typename Task::K>& searches, int first,
                                                Launch launch) {
  const int64_t tallies = 2 * Task::sides * kWarps * table.units() + 1;
  const Scratch<int64_t> before(tallies, launch);
  const Search<typename Task::K>* const found = searches.found;
  find_digits(table, searches, first, kDigits<typename Task::K>, launch);
  start_units(tally_kernel<Task, kRoom>, table, launch, found, before.get());
  prefix_sums(before.get(), before.get(), tallies, launch);
  start_units(compact_kernel<Task, kRoom>, table, launch, found, static_cast<const int64_t*>(before.get()));
}

// ---- by a sample --------------------------------------------------------------------------------------------

// Elements of a sample. The tests make it small, so that short tensors are sampled.
#ifndef HVC_SAMPLE
#define HVC_SAMPLE (1 << 16)
#define HVC_LEAST_SAMPLED (1 << 22)
#endif
constexpr int64_t kSample = HVC_SAMPLE;

// From how many elements on a sample pays. It takes some fifteen launches for its tensor, and saves it four of five
// passes over the memory: as much time for about four million elements.
constexpr int64_t kLeastSampled = HVC_LEAST_SAMPLED;
bool is_sampled(int64_t count, int64_t k) { return count >= kLeastSampled && k <= count / 16 && count <= INT32_MAX; }
// How many candidates there is room for. Two digits of a cut leave the sample's own error: a fifth more candidates than
// are kept, most of the time.
template <int kSides> int64_t room_for(int64_t k) { return kSides * (3 * k + kSample / 16); }
constexpr int kDigitsOfFloor = 2;

// The rank in a sample of some size that the k-th largest of all has, and some more: it falls short once in 30,000
// times.
int64_t rank_in_sample(int64_t size, int64_t count, int64_t k) {
  const double expected = double(k) * double(size) / double(count);
  return int64_t(expected + 4 * std::sqrt(expected) + 8);
}

// One tensor. `wanting` becomes 1 where a sample has misled, as where a cut goes through very many equal elements.
template <int kSides, class T> struct Wanted {
  Input<T> in;
  Kept<Work<T>> kept[kSides];
  int64_t *sizes, *nonfinite, *wanting;

  template <class Source> Task<kSides, Source> task(const Source& source) const {
    Task<kSides, Source> task{source, in.k, {}, sizes, nonfinite};
    std::copy(kept, kept + kSides, task.kept);
    return task;
  }
};

// Finds, in a sample, a key that about all that are kept will reach.
template <int kSides, class T, class K>
void find_floors(const Input<T>& in, const Searches<kSides, K>& floors, Launch launch) {
  using W = Work<T>;
  const int64_t step = in.count / kSample, size = in.count / step, rank = rank_in_sample(size, in.count, in.k);
  const Scratch<W> values(size, launch);
  const Sampled<T> sampled{in, step, values.get()};
  alone(Task<kSides, Sampled<T>>{sampled, rank, {}, nullptr, nullptr}, size,
        [&](const auto& table) { find_digits(table, floors, 0, 1, launch); });
  alone(Task<kSides, Sample<W>>{{values.get(), size}, rank, {}, nullptr, nullptr}, size,
        [&](const auto& table) { find_digits(table, floors, 1, kDigitsOfFloor, launch); });
}

// Writes what each side keeps, and how many; notes if the candidates were not enough.
template <int kSides, class T> void select_sampled(const Wanted<kSides, T>& wanted, Launch launch) {
  using W = Work<T>;
  using K = Key<W>;
  const Input<T>& in = wanted.in;
  const int64_t room = room_for<kSides>(in.k), chunks = ceil_div(in.count, kChunk);
  const Scratch<Search<K>> floors(kSides, launch), found(kSides, launch);
  const Scratch<Candidate<W>> list(room, launch);
  const Scratch<int64_t> before(chunks + 1, launch);  // ends with how many were found
  const EmptyBins<kSides> bins(1, launch);
  find_floors(in, Searches<kSides, K>{bins.get(), floors.get()}, launch);
  const int64_t* const candidates = before.get() + chunks;
  const Few<W> few{list.get(), candidates, room};
  const Noted<K> noted{floors.get(), candidates, room, wanted.wanting};
  const Searches<kSides, K> searches{bins.get(), found.get()};
  find_candidates<kSides>(in, floors.get(), few, before.get(), wanted.nonfinite, searches.digit(0, 0, in.k), noted,
                          launch);
  alone(wanted.task(few), room, [&](const auto& table) { select_in(table, searches, 1, launch); });
}

// ---- one side of two ----------------------------------------------------------------------------------------

// What both sides keep of a tensor, and what is written of the side that stands for it.
template <class W> struct Sides {
  Kept<W> kept[kApart];
  int64_t blocks;  // of a side, at most
  int64_t* sizes;
  double* sums;
  W* mean;
  int64_t* numbers;
  int32_t* positions;
};

// The order of rules/tree.h: a warp adds a block of one side.
template <class W, class Table> __global__ void sums_kernel(const __grid_constant__ Table table) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Sides<W>& sides = table.items[item];
    const int64_t number = unit - table.begins[item];
    const int side = number >= sides.blocks;
    const W* values = sides.kept[side].values;
    const int64_t begin = number % sides.blocks * kBlock, end = min(begin + kBlock, sides.sizes[side]);
    double sum = 0;
    for (int64_t i = begin + lane_index(); i < end; i += kWarp) sum += double(values[i]);
    for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_down_sync(kAllLanes, sum, half);
    if (lane_index() == 0) sides.sums[number] = sum;
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

// A block of one thread for each tensor. Afterwards sizes[0] is what the winner keeps, sizes[1] which side that is.
template <class W, class Table> __global__ void winner_kernel(const __grid_constant__ Table table) {
  for (int64_t item = blockIdx.x; item < table.count; item += gridDim.x) {
    const Sides<W>& sides = table.items[item];
    int64_t* const sizes = sides.sizes;
    const double positive = sum_of_blocks(sides.sums, sizes[0]);
    const double negative = sum_of_blocks(sides.sums + sides.blocks, sizes[1]);
    const int side = negatives_win(positive, sizes[0], -negative, sizes[1]);
    const double sum = side ? negative : positive;
    *sides.mean = sizes[side] == 0 ? W(0) : W(sum / double(sizes[side]));
    sides.numbers[0] = sizes[0] = sizes[side];
    sizes[1] = side;
  }
}

template <class W, class Table> __global__ void copy_kernel(const __grid_constant__ Table table) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Sides<W>& sides = table.items[item];
    const int32_t* const winner = sides.kept[sides.sizes[1]].positions;
    const int64_t begin = (unit - table.begins[item]) * kBlock, end = min(begin + kBlock, sides.sizes[0]);
    for (int64_t i = begin + lane_index(); i < end; i += kWarp) sides.positions[i] = winner[i];
  }
}

// Chooses the side of every tensor.
template <class W> void choose_sides(const std::vector<Sides<W>>& all, Launch launch) {
  const auto sides = [&](int64_t i) { return all[size_t(i)]; };
  const auto blocks = [&](int64_t i) { return all[size_t(i)].blocks; };
  const auto number = int64_t(all.size());
  in_tables<Sides<W>>(
      number, sides, [&](int64_t i) { return kApart * blocks(i); },
      [&](const auto& table, int64_t) {
        using Table = std::decay_t<decltype(table)>;
        start(sums_kernel<W, Table>, table.units() * kWarp, launch, table);
        start_blocks(winner_kernel<W, Table>, std::min(table.count, kMostBlocks), 1, launch, table);
      });
  in_tables<Sides<W>>(number, sides, blocks, [&](const auto& table, int64_t) {
    start(copy_kernel<W, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table);
  });
}

// ---- launchers --------------------------------------------------------------------------------------------

// The tensors that take a sample one by one, all others at once.
template <int kSides, class T>
void select_largest(const std::vector<Wanted<kSides, T>>& all, bool whole, Launch launch) {
  using K = Key<Work<T>>;
  std::vector<Wanted<kSides, T>> others;
  for (const Wanted<kSides, T>& wanted : all)
    if (!whole && is_sampled(wanted.in.count, wanted.in.k))
      select_sampled(wanted, launch);
    else
      others.push_back(wanted);
  const auto task = [&](int64_t i) { return others[size_t(i)].task(Whole<T>{others[size_t(i)].in}); };
  const auto units = [&](int64_t i) { return ceil_div(others[size_t(i)].in.count, kUnit<Whole<T>>); };
  in_tables<Task<kSides, Whole<T>>>(int64_t(others.size()), task, units, [&](const auto& table, int64_t) {
    if (table.units() == 0) return;
    const Scratch<Search<K>> found(table.count * kSides, launch);
    const EmptyBins<kSides> bins(table.count, launch);
    select_in(table, Searches<kSides, K>{bins.get(), found.get()}, 0, launch);
  });
}

template <class Tensor> void clear_numbers(const Tensor* tensors, int64_t tensor_count, Launch launch) {
  clear_all(
      tensor_count, [&](int64_t i) { return tensors[i].numbers; }, [](int64_t) { return kSelected * sizeof(int64_t); },
      launch);
}

}  // namespace

void top_select(const TopSelected* tensors, int64_t tensor_count, Dtype dtype, bool whole, Launch launch) {
  clear_numbers(tensors, tensor_count, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    std::vector<Wanted<kTogether, T>> all;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const TopSelected& t = tensors[i];
      all.push_back({input<T>(t.grad, t.residual, t.count, t.k),
                     {{t.positions, static_cast<Work<T>*>(t.values)}},
                     t.numbers,
                     t.numbers + 1,
                     t.numbers + 2});
    }
    select_largest(all, whole, launch);
  });
}

void binary_select(const BinarySelected* tensors, int64_t tensor_count, Dtype dtype, bool whole, Launch launch) {
  clear_numbers(tensors, tensor_count, launch);
  int64_t most = 0, blocks = 0;
  for (int64_t i = 0; i < tensor_count; ++i) most += tensors[i].k, blocks += ceil_div(tensors[i].k, kBlock);
  const Scratch<int32_t> chosen(kApart * most, launch);
  const Scratch<double> sums(kApart * blocks, launch);
  const Scratch<int64_t> sizes(kApart * tensor_count, launch);
  clear(sizes.get(), kApart * tensor_count * int64_t(sizeof(int64_t)), launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Scratch<W> values(kApart * most, launch);
    std::vector<Wanted<kApart, T>> all;
    std::vector<Sides<W>> sides;
    int64_t at = 0, sum = 0;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const BinarySelected& t = tensors[i];
      const Kept<W> positive{chosen.get() + at, values.get() + at},
          negative{positive.positions + t.k, positive.values + t.k};
      int64_t* const size = sizes.get() + kApart * i;
      all.push_back(
          {input<T>(t.grad, t.residual, t.count, t.k), {positive, negative}, size, t.numbers + 1, t.numbers + 2});
      sides.push_back({{positive, negative},
                       ceil_div(t.k, kBlock),
                       size,
                       sums.get() + sum,
                       static_cast<W*>(t.mean),
                       t.numbers,
                       t.positions});
      at += kApart * t.k, sum += kApart * sides.back().blocks;
    }
    select_largest(all, whole, launch);
    choose_sides(sides, launch);
  });
}

}  // namespace hvc
