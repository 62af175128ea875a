// Sums of rows in the order of rules/tree.h, or the largest, in the launch that makes those of the blocks: of the warps
// that share a superblock the last one adds up its blocks, and of the superblocks of a row the last one adds up these.
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

// A warp takes values in index order, from nothing: 32 are loaded at once, and the next ones meanwhile. Every lane gets
// the result.
template <class V> __device__ V in_order(const V* values, int64_t count) {
  V total{}, mine = lane_index() < count ? loaded_value(values + lane_index()) : V{};
  for (int64_t first = 0; first < count; first += kWarp) {
    const int64_t next = first + kWarp + lane_index();
    const V coming = next < count ? loaded_value(values + next) : V{};
#pragma unroll
    for (int lane = 0; lane < kWarp; ++lane) total.take(value_of_lane(mine, lane));
    mine = coming;
  }
  return total;
}

// ---- the tree of a tensor -----------------------------------------------------------------------------------

constexpr int64_t kBlocksOfUnit = kSuperblock / kBlock;

// `row_length` is no longer than the tensor.
template <class V> struct Tree {
  V *of_blocks, *of_units;  // what was found; absent where nobody wants it
  unsigned* arrived;        // of every superblock, then of every row
  int64_t count, row_length, blocks_per_row;
};

inline int64_t row_within(int64_t count, int64_t row_length) {
  return std::max<int64_t>(std::min(count, row_length), 1);
}
inline int64_t blocks_in(int64_t count, int64_t row_length) {
  const int64_t row = row_within(count, row_length);
  return count / row * ceil_div(row, kBlock) + ceil_div(count % row, kBlock);
}

// A block of a tensor: its row, and its elements.
struct BlockOfTree {
  int64_t row, begin;
  int count;
};
template <class V> __device__ BlockOfTree block_of(const Tree<V>& tree, int64_t block) {
  const int64_t row = block < tree.blocks_per_row ? 0 : block / tree.blocks_per_row;
  const int64_t begin = row * tree.row_length + (block - row * tree.blocks_per_row) * kBlock;
  return {row, begin, int(min(min(kBlock, (row + 1) * tree.row_length - begin), tree.count - begin))};
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

// A warp brings what it has found of a block; put(row, found) is called by one lane for each row, at its end.
template <class V, class Put>
__device__ void add_up(const Tree<V>& tree, int64_t block, int64_t row, const V& found, const Put& put) {
  const int64_t first = row * tree.blocks_per_row;
  const int64_t blocks = min(tree.blocks_per_row, ceil_div(tree.count - row * tree.row_length, kBlock));
  if (blocks == 1) {
    if (lane_index() == 0) put(row, found);
    return;
  }
  const int64_t units_per_row = ceil_div(tree.blocks_per_row, kBlocksOfUnit), unit = (block - first) / kBlocksOfUnit;
  const int64_t begin = first + unit * kBlocksOfUnit, units = ceil_div(blocks, kBlocksOfUnit);
  if (lane_index() == 0) tree.of_blocks[block] = found;
  const int64_t in_unit = min(kBlocksOfUnit, first + blocks - begin), number = row * units_per_row + unit;
  if (!is_last_warp(tree.arrived + number, in_unit)) return;
  V total = in_order(tree.of_blocks + begin, in_unit);
  if (units > 1) {
    if (lane_index() == 0) tree.of_units[number] = total;
    const int64_t all = ceil_div(tree.count, tree.row_length) * units_per_row;
    if (!is_last_warp(tree.arrived + all + row, units)) return;
    total = in_order(tree.of_units + row * units_per_row, units);
  }
  if (lane_index() == 0) put(row, total);
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

// The bytes of a tensor's bits that are cleared before: where rows share words, bits are added to these.
inline int64_t bytes_to_clear(int64_t count, int64_t row_length) {
  return has_whole_halves(count, row_length) ? 0 : words_for(count) * int64_t(sizeof(uint64_t));
}

// ---- the trees of several tensors ---------------------------------------------------------------------------

// The trees of several tensors, and their memory for one launch.
template <class V> class Trees {
 public:
  // `shape(i)` has the count and the row_length of tensor i. Without `wanted` there are none.
  template <class ShapeOf> Trees(int64_t tensors, const ShapeOf& shape, bool wanted, Launch launch)
      : places_(size_t(tensors) + 1),
        values_(wanted ? placed(tensors, shape) : 0, launch),
        arrived_(wanted ? places_.back().arrived : 0, launch) {
    clear(arrived_.get(), places_.back().arrived * int64_t(sizeof(unsigned)), launch);
  }

  // The tree of tensor i, of that shape.
  Tree<V> of(int64_t i, int64_t count, int64_t row_length) const {
    const int64_t row = row_within(count, row_length), per_row = ceil_div(row, kBlock);
    if (!values_.get()) return {nullptr, nullptr, nullptr, count, row, per_row};
    const Place& place = places_[size_t(i)];
    V* const blocks = values_.get() + place.value;
    return {blocks, blocks + place.blocks, arrived_.get() + place.arrived, count, row, per_row};
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
      const int64_t units = rows * ceil_div(per_row, kBlocksOfUnit);
      next.blocks = rows * per_row;
      places_[size_t(i)] = next;
      next.value += next.blocks + units;
      next.arrived += per_row > 1 ? units + rows : 0;
    }
    places_[size_t(tensors)] = next;
    return next.value;
  }

  std::vector<Place> places_;
  Scratch<V> values_;
  Scratch<unsigned> arrived_;
};

}  // namespace
}  // namespace hvc
