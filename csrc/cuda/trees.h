// Sums of rows in the order of rules/tree.h, or the largest: one launch makes those of the blocks, and a second one,
// for all tensors, those of the superblocks, of which the last of a row adds up all. To wait for others in the first
// launch costs more: every warp would wait for what it has written, a third of the time that its block takes.
#pragma once
#include <vector>

#include "rules/tree.h"
#include "rows.h"

namespace hvc {
namespace {

// ---- what is added up ---------------------------------------------------------------------------------------

// One number of a block, added; it can stand for a row's as well.
struct Sum {
  double sum;
  __device__ void take(const Sum& other) { sum += other.sum; }
};

// Numbers of 64 bits, as a warp hands them round and memory of all multiprocessors has them.
template <class V> constexpr int kNumbers = int(sizeof(V) / sizeof(double));
template <class V> __device__ double& number(V& value, int i) { return reinterpret_cast<double*>(&value)[i]; }

template <class V> __device__ V value_of_lane(V value, int lane) {
#pragma unroll
  for (int i = 0; i < kNumbers<V>; ++i) number(value, i) = __shfl_sync(kAllLanes, number(value, i), lane);
  return value;
}

template <class V> __device__ V loaded_value(const V* from) {
  V value;
#pragma unroll
  for (int i = 0; i < kNumbers<V>; ++i) number(value, i) = __ldcg(reinterpret_cast<const double*>(from) + i);
  return value;
}

// A warp takes values in index order, from nothing: several times 32 are loaded at once. Every lane gets the result.
template <class V> __device__ V in_order(const V* values, int64_t count) {
  constexpr int kAtOnce = 4;
  V total{};
  for (int64_t first = 0; first < count; first += kAtOnce * kWarp) {
    V mine[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t i = first + k * kWarp + lane_index();
      mine[k] = i < count ? loaded_value(values + i) : V{};
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * kWarp >= count) break;
#pragma unroll 8
      for (int lane = 0; lane < kWarp; ++lane) total.take(value_of_lane(mine[k], lane));
    }
  }
  return total;
}

// ---- the tree of a tensor -----------------------------------------------------------------------------------

constexpr int64_t kBlocksOfUnit = kSuperblock / kBlock;

// `row_length` is no longer than the tensor.
template <class V> struct Tree {
  V *of_blocks, *of_units;  // what was found; absent where nobody wants it
  unsigned* arrived;        // superblocks of every row
  int64_t count, row_length, blocks_per_row;

  __device__ int64_t units_per_row() const { return ceil_div(blocks_per_row, kBlocksOfUnit); }
  __device__ int64_t blocks_of(int64_t row) const {
    return min(blocks_per_row, ceil_div(count - row * row_length, kBlock));
  }
};

inline int64_t row_within(int64_t count, int64_t row_length) {
  return std::max<int64_t>(std::min(count, row_length), 1);
}
// Rows of so many blocks are a warp's work, and need no second launch; of longer rows a warp takes a block.
constexpr int64_t kBlocksOfWarp = 4;

__host__ __device__ inline bool is_short(int64_t blocks_per_row) { return blocks_per_row <= kBlocksOfWarp; }

// How many warps a tensor gives work to.
inline int64_t stretches_in(int64_t count, int64_t row_length) {
  const int64_t row = row_within(count, row_length), per_row = ceil_div(row, kBlock);
  if (is_short(per_row)) return ceil_div(count, row);
  return count / row * per_row + ceil_div(count % row, kBlock);
}

// The work of a warp: a short row, or a block of a longer one.
struct Stretch {
  int64_t row, begin, end, block;
};
template <class V> __device__ Stretch stretch_of(const Tree<V>& tree, int64_t number) {
  const bool is_row = is_short(tree.blocks_per_row);
  const int64_t row = is_row ? number : number < tree.blocks_per_row ? 0 : number / tree.blocks_per_row;
  const int64_t first = row * tree.row_length, end = min(first + tree.row_length, tree.count);
  if (is_row) return {row, first, end, number};
  const int64_t begin = first + (number - row * tree.blocks_per_row) * kBlock;
  return {row, begin, min(begin + kBlock, end), number};
}

// Of the warps that come here so often, whether this one is the last. It sees what the first lanes of the others have
// written before.
__device__ inline bool is_last_warp(unsigned* arrived, int64_t warps) {
  unsigned before = 0;
  if (lane_index() == 0) {
    __threadfence();
    before = atomicAdd(arrived, 1u);
    __threadfence();
  }
  before = __shfl_sync(kAllLanes, before, 0);
  __syncwarp();
  return before == unsigned(warps - 1);
}

// A tree, and put(row, found) for what comes out, called by one lane.
template <class V, class Put> struct Adding {
  Tree<V> tree;
  Put put;
};

// A warp brings what it has found of its stretch.
template <class V, class Put>
__device__ void note_stretch(const Adding<V, Put>& adding, const Stretch& stretch, const V& found) {
  if (lane_index() != 0) return;
  if (is_short(adding.tree.blocks_per_row))
    adding.put(stretch.row, found);
  else
    adding.tree.of_blocks[stretch.block] = found;
}

// A warp takes a superblock.
template <class V, class Put> __device__ void add_unit(const Adding<V, Put>& adding, int64_t unit) {
  const Tree<V>& tree = adding.tree;
  const int64_t per_row = tree.units_per_row(), row = per_row == 1 ? unit : unit / per_row;
  const int64_t blocks = tree.blocks_of(row), units = ceil_div(blocks, kBlocksOfUnit);
  const int64_t first = (unit - row * per_row) * kBlocksOfUnit;
  V total = in_order(tree.of_blocks + row * tree.blocks_per_row + first, min(kBlocksOfUnit, blocks - first));
  if (units > 1) {
    if (lane_index() == 0) tree.of_units[unit] = total;
    if (!is_last_warp(tree.arrived + row, units)) return;
    total = in_order(tree.of_units + row * per_row, units);
  }
  if (lane_index() == 0) adding.put(row, total);
}

template <class Table> __global__ void add_kernel(const __grid_constant__ Table table) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    add_unit(table.items[item], unit - table.begins[item]);
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
      : places_(size_t(tensors) + 1),
        values_(wanted ? placed(tensors, shape) : 0, launch),
        arrived_(values_.get() ? places_.back().arrived : 0, launch) {
    clear(arrived_.get(), arrived_.get() ? places_.back().arrived * int64_t(sizeof(unsigned)) : 0, launch);
  }

  // The tree of tensor i, of that shape.
  Tree<V> of(int64_t i, int64_t count, int64_t row_length) const {
    const int64_t row = row_within(count, row_length), per_row = ceil_div(row, kBlock);
    if (!values_.get()) return {nullptr, nullptr, nullptr, count, row, per_row};
    const Place& place = places_[size_t(i)];
    V* const blocks = values_.get() + place.value;
    return {blocks, blocks + place.blocks, arrived_.get() + place.arrived, count, row, per_row};
  }

  // Adds up what was noted of blocks: `adding(i)` has the tree of tensor i.
  template <class AddingOf> void add(int64_t tensors, const AddingOf& adding, Launch launch) const {
    if (!values_.get() || !several_) return;
    const auto units = [&](int64_t i) {
      const auto tree = adding(i).tree;
      return is_short(tree.blocks_per_row) ? 0 : units_of(tree.count, tree.row_length).total;
    };
    in_tables<decltype(adding(0))>(tensors, adding, units, [&](const auto& table, int64_t) {
      start_spread(add_kernel<std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table);
    });
  }

 private:
  struct Place {
    int64_t value, blocks, arrived;  // the first value and counter of a tensor, and how many blocks it has
  };

  // Finds the places of all, and returns how many values there are.
  template <class ShapeOf> int64_t placed(int64_t tensors, const ShapeOf& shape) {
    Place next{};
    for (int64_t i = 0; i < tensors; ++i) {
      const auto [count, given] = shape(i);
      const int64_t row = row_within(count, given), rows = ceil_div(count, row), per_row = ceil_div(row, kBlock);
      const Units units = units_of(count, row);
      next.blocks = rows * per_row;
      places_[size_t(i)] = next;
      next.value += next.blocks + units.total;
      next.arrived += units.per_row > 1 ? rows : 0;
      several_ |= !is_short(per_row);
    }
    places_[size_t(tensors)] = next;
    return next.value;
  }

  bool several_ = false;  // warps in some row
  std::vector<Place> places_;
  Scratch<V> values_;
  Scratch<unsigned> arrived_;
};

}  // namespace
}  // namespace hvc
