// Sums of rows in the order of rules/tree.h, or the largest. Those of rows of up to eight blocks are made in one
// launch. Of longer rows it makes those of the blocks, and a second one, for all tensors, those of the superblocks;
// where a row has more than eight of these, the last block of threads adds them up. To wait for others in the first
// launch costs more: every warp would wait for what it has written, a third of the time that its block takes.
#pragma once
#include <vector>

#include "rules/tree.h"
#include "grid.h"
#include "rows.h"

namespace hvc {
namespace {

constexpr int64_t kBlocksOfUnit = kSuperblock / kBlock;

// ---- what is added up ---------------------------------------------------------------------------------------

// One number of a block, added; it can stand for a row's as well.
struct Sum {
  double sum;
  __device__ void take(const Sum& other) { sum += other.sum; }
};

// Numbers of 64 bits, as a warp hands them round.
template <class V> constexpr int kNumbers = int(sizeof(V) / sizeof(double));
template <class V> __device__ double& number(V& value, int i) { return reinterpret_cast<double*>(&value)[i]; }

template <class V> __device__ V value_of_lane(V value, int lane) {
#pragma unroll
  for (int i = 0; i < kNumbers<V>; ++i) number(value, i) = __shfl_sync(kAllLanes, number(value, i), lane);
  return value;
}

// A warp takes at most a superblock's values in index order, from nothing, all of them loaded at once. Every lane gets
// the result.
template <class V> __device__ V in_order(const V* values, int count) {
  constexpr int kEach = int(kBlocksOfUnit) / kWarp;
  V mine[kEach], total{};
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int i = k * kWarp + lane_index();
    mine[k] = i < count ? values[i] : V{};
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (k * kWarp >= count) break;
#pragma unroll 8
    for (int lane = 0; lane < kWarp; ++lane) total.take(value_of_lane(mine[k], lane));
  }
  return total;
}

// ---- the tree of a tensor -----------------------------------------------------------------------------------

// `row_length` is no longer than the tensor.
template <class V> struct Tree {
  V *of_blocks, *of_units;  // what was found; absent where nobody wants it
  int64_t count, row_length, blocks_per_row;

  __host__ __device__ int64_t rows() const { return ceil_div(count, row_length); }
  __host__ __device__ int64_t units_per_row() const { return ceil_div(blocks_per_row, kBlocksOfUnit); }
  // The superblocks of a row, and after them how many blocks of threads have added some.
  __device__ V* units_of_row(int64_t row) const { return of_units + row * (units_per_row() + 1); }
  __device__ unsigned* arrived(int64_t row) const {
    return reinterpret_cast<unsigned*>(units_of_row(row) + units_per_row());
  }
  __device__ int64_t blocks_of(int64_t row) const {
    return min(blocks_per_row, ceil_div(count - row * row_length, kBlock));
  }
};

inline int64_t row_within(int64_t count, int64_t row_length) {
  return std::max<int64_t>(std::min(count, row_length), 1);
}

// A group of warps, a block of threads, takes as many blocks of elements. Rows of no more than these are added up by
// the group, which takes as many of them as are whole, and need no second launch.
constexpr int kWarpsOfGroup = kThreads / kWarp;

__host__ __device__ inline bool is_short(int64_t blocks_per_row) { return blocks_per_row <= kWarpsOfGroup; }

// How many groups a tensor gives work to.
inline int64_t groups_in(int64_t count, int64_t row_length) {
  const int64_t row = row_within(count, row_length), per_row = ceil_div(row, kBlock);
  if (is_short(per_row)) return ceil_div(ceil_div(count, row), kWarpsOfGroup / per_row);
  return ceil_div(count / row * per_row + ceil_div(count % row, kBlock), kWarpsOfGroup);
}

// The work of a warp: a block of a row, where there is one.
struct Stretch {
  int64_t row, begin, block;  // `block`: its number in the row
  int count;
};
template <class V> __device__ Stretch stretch_of(const Tree<V>& tree, int64_t group) {
  const int warp = int(threadIdx.x) / kWarp;
  int64_t row, block;
  if (is_short(tree.blocks_per_row)) {
    const int per_row = int(tree.blocks_per_row), rows = kWarpsOfGroup / per_row;
    if (warp >= rows * per_row) return {};
    row = group * rows + warp / per_row, block = warp % per_row;
  } else {
    const int64_t number = group * kWarpsOfGroup + warp;
    row = number < tree.blocks_per_row ? 0 : number / tree.blocks_per_row;
    block = number - row * tree.blocks_per_row;
  }
  const int64_t first = row * tree.row_length, begin = first + block * kBlock;
  const int64_t left = min(first + tree.row_length, tree.count) - begin;
  return {row, begin, block, int(max(min(left, int64_t(kBlock)), int64_t(0)))};
}

// A tree, and put(row, found) for what comes out, called by one lane.
template <class V, class Put> struct Adding {
  Tree<V> tree;
  Put put;
};

// What this warp of a group and those behind it have found, `warps` in all, for its first lane. All of the group come.
template <class V> __device__ V sum_of_warps(V found, int warps) {
  __shared__ double all[kWarpsOfGroup * kNumbers<V>];
  double* const mine = all + threadIdx.x / kWarp * kNumbers<V>;
  if (lane_index() == 0) {
#pragma unroll
    for (int i = 0; i < kNumbers<V>; ++i) mine[i] = number(found, i);
  }
  __syncthreads();
  V total{};
  for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
    for (int i = 0; i < kNumbers<V>; ++i) number(found, i) = mine[warp * kNumbers<V> + i];
    total.take(found);
  }
  __syncthreads();
  return total;
}

// A warp brings what it has found of its stretch; all warps of a group come.
template <class V, class Put>
__device__ void note_stretch(const Adding<V, Put>& adding, const Stretch& stretch, const V& found) {
  const Tree<V>& tree = adding.tree;
  if (is_short(tree.blocks_per_row)) {
    const bool begins = stretch.count > 0 && stretch.block == 0;
    const V total =
        tree.blocks_per_row == 1 ? found : sum_of_warps(found, begins ? int(tree.blocks_of(stretch.row)) : 0);
    if (lane_index() == 0 && begins) adding.put(stretch.row, total);
    return;
  }
  if (lane_index() != 0 || stretch.count == 0) return;
  tree.of_blocks[stretch.row * tree.blocks_per_row + stretch.block] = found;
  if (stretch.block == 0) *tree.arrived(stretch.row) = 0;  // for the second launch
}

// Calls take(item, first element, how many, counter of what is not finite) for the blocks of all items of a table; its
// results are added up.
template <class Table, class Take>
__device__ void each_stretch(const Table& table, int64_t* nonfinite, const Take& take) {
  for (int64_t group = blockIdx.x; group < table.units(); group += gridDim.x) {
    const int number = table.item_of(group);
    const auto& item = table.items[number];
    const Stretch stretch = stretch_of(item.adding.tree, group - table.begins[number]);
    int bad = 0;
    decltype(take(item, stretch.begin, stretch.count, bad)) found{};
    if (stretch.count > 0) found = take(item, stretch.begin, stretch.count, bad);
    add_count(nonfinite + number, bad);
    if (item.adding.tree.of_blocks) note_stretch(item.adding, stretch, found);
  }
}

// A warp adds a superblock: a block of threads takes eight rows of one, or eight superblocks of a longer row.
constexpr int64_t kUnitsAtOnce = kWarpsOfGroup;

// How many blocks of threads a tree gives work to.
template <class V> int64_t parts_of(const Tree<V>& tree) {
  if (is_short(tree.blocks_per_row)) return 0;
  const int64_t units = tree.units_per_row();
  return units == 1 ? ceil_div(tree.rows(), kUnitsAtOnce) : tree.rows() * ceil_div(units, kUnitsAtOnce);
}

// What the superblocks of a row come to, in their order, for the first thread of a block.
template <class V> __device__ V sum_of_units(const V* units, int64_t count) {
  constexpr int kAtOnce = 2 * kThreads, kDoubles = kAtOnce * kNumbers<V>;
  __shared__ double staged[kDoubles];
  const auto* const doubles = reinterpret_cast<const double*>(units);
  V total{};
  for (int64_t first = 0; first < count; first += kAtOnce) {
    const int here = int(min(count - first, int64_t(kAtOnce)));
    __syncthreads();
    for (int i = int(threadIdx.x); i < here * kNumbers<V>; i += kThreads)
      staged[i] = __ldcg(doubles + first * kNumbers<V> + i);
    __syncthreads();
    if (threadIdx.x != 0) continue;
#pragma unroll 8
    for (int unit = 0; unit < here; ++unit) {
      V value;
#pragma unroll
      for (int i = 0; i < kNumbers<V>; ++i) number(value, i) = staged[unit * kNumbers<V> + i];
      total.take(value);
    }
  }
  return total;
}

// Of a row of several superblocks.
template <class V, class Put> __device__ void add_part_of_row(const Adding<V, Put>& adding, int64_t row, int64_t part) {
  const Tree<V>& tree = adding.tree;
  const int64_t blocks = tree.blocks_of(row), units = ceil_div(blocks, kBlocksOfUnit);
  const int64_t mine = part * kUnitsAtOnce + threadIdx.x / kWarp, first = mine * kBlocksOfUnit;
  if (part * kUnitsAtOnce >= units) return;  // the last row of a tensor may be shorter
  V of_warp{};
  if (mine < units) {
    const V* const values = tree.of_blocks + row * tree.blocks_per_row + first;
    of_warp = in_order(values, int(min(kBlocksOfUnit, blocks - first)));
  }
  if (units <= kUnitsAtOnce) {  // this group has them all
    const V total = sum_of_warps(of_warp, mine == 0 ? int(units) : 0);
    if (threadIdx.x == 0) adding.put(row, total);
    return;
  }
  V* const found = tree.units_of_row(row);
  if (mine < units && lane_index() == 0) found[mine] = of_warp;
  if (!is_last_of(tree.arrived(row), unsigned(ceil_div(units, kUnitsAtOnce)))) return;
  const V total = sum_of_units(found, units);
  if (threadIdx.x == 0) adding.put(row, total);
}

template <class V, class Put> __device__ void add_part(const Adding<V, Put>& adding, int64_t number) {
  const Tree<V>& tree = adding.tree;
  const int64_t parts = ceil_div(tree.units_per_row(), kUnitsAtOnce);
  if (tree.units_per_row() > 1) return add_part_of_row(adding, number / parts, number % parts);
  const int64_t row = number * kUnitsAtOnce + threadIdx.x / kWarp;
  if (row >= tree.rows()) return;
  const V total = in_order(tree.of_blocks + row * tree.blocks_per_row, int(tree.blocks_of(row)));
  if (lane_index() == 0) adding.put(row, total);
}

template <class Table> __global__ void add_kernel(const __grid_constant__ Table table) {
  for (int64_t number = blockIdx.x; number < table.units(); number += gridDim.x) {
    const int item = table.item_of(number);
    add_part(table.items[item], number - table.begins[item]);
  }
}

// ---- bits ---------------------------------------------------------------------------------------------------

// Writes the bits of a block, a lane those of its group. What fills the last word of a tensor is 0.
template <class V>
__device__ void put_block(uint32_t* halves, const Tree<V>& tree, int64_t begin, int count, uint32_t bits) {
  const bool whole_halves = has_whole_halves(tree.count, tree.row_length);
  const int groups = int(ceil_div(int64_t(count), kWarp)), lane = lane_index();
  if (lane < groups) put_bits(halves, begin + lane * kWarp, bits, whole_halves);
  const int64_t end = begin + count;
  if (whole_halves && lane == 0 && end == tree.count && ceil_div(end, kWarp) % 2 != 0) halves[ceil_div(end, kWarp)] = 0;
}

// Clears the bits of tensors, if there is one whose rows share words: bits are added to these.
template <class Tensor> void clear_bits(const Tensor* tensors, int64_t tensor_count, Launch launch) {
  const auto shares = [](const Tensor& t) { return !has_whole_halves(t.count, t.row_length); };
  if (std::none_of(tensors, tensors + tensor_count, shares)) return;
  clear_all(
      tensor_count, [&](int64_t i) { return tensors[i].bits; },
      [&](int64_t i) { return words_for(tensors[i].count) * int64_t(sizeof(uint64_t)); }, launch);
}

// ---- the trees of several tensors ---------------------------------------------------------------------------

// The trees of several tensors, and their memory for one call.
template <class V> class Trees {
 public:
  // `shape(i)` has the count and the row_length of tensor i. Without `wanted` there are none.
  template <class ShapeOf> Trees(int64_t tensors, const ShapeOf& shape, bool wanted, Launch launch)
      : begins_(size_t(tensors)), values_(wanted ? placed(tensors, shape) : 0, launch) {}

  // The tree of tensor i, of that shape.
  Tree<V> of(int64_t i, int64_t count, int64_t row_length) const {
    const int64_t row = row_within(count, row_length), per_row = ceil_div(row, kBlock);
    if (!values_.get()) return {nullptr, nullptr, count, row, per_row};
    V* const blocks = values_.get() + begins_[size_t(i)];
    return {blocks, blocks + ceil_div(count, row) * per_row, count, row, per_row};
  }

  // Adds up what was noted of blocks: `adding(i)` has the tree of tensor i.
  template <class AddingOf> void add(int64_t tensors, const AddingOf& adding, Launch launch) const {
    if (!values_.get() || !has_long_) return;
    const auto units = [&](int64_t i) { return parts_of(adding(i).tree); };
    in_tables<decltype(adding(0))>(tensors, adding, units, [&](const auto& table, int64_t) {
      start_groups(add_kernel<std::decay_t<decltype(table)>>, table.units(), launch, table);
    });
  }

 private:
  // Finds the places of all, and returns how many values there are.
  template <class ShapeOf> int64_t placed(int64_t tensors, const ShapeOf& shape) {
    int64_t values = 0;
    for (int64_t i = 0; i < tensors; ++i) {
      const auto [count, given] = shape(i);
      const int64_t row = row_within(count, given), per_row = ceil_div(row, kBlock);
      begins_[size_t(i)] = values;
      values += ceil_div(count, row) * (per_row + ceil_div(per_row, kBlocksOfUnit) + 1);
      has_long_ |= !is_short(per_row);
    }
    return values;
  }

  bool has_long_ = false;  // rows, which need a second launch
  std::vector<int64_t> begins_;
  Scratch<V> values_;
};

}  // namespace
}  // namespace hvc
