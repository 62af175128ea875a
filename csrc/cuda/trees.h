// Sums of rows in the order of rules/tree.h, or the largest: one launch makes those of the blocks, and a second one,
// for all tensors, adds these up. To wait for others in the first launch costs more: every warp would wait for what it
// has written, a third of the time that its block takes. In the second one a block adds a whole row for the same
// reason.
#pragma once
#include <vector>

#include "rules/tree.h"
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

// ---- rows of several superblocks ----------------------------------------------------------------------------

// A lane adds the values of one superblock in index order. A warp reads those of 32 superblocks, so many of each at a
// time, neighbours together, and hands them round in shared memory, where superblocks begin on different banks.
template <class V> constexpr int kOfPiece = kNumbers<V> == 1 ? 16 : kNumbers<V> == 2 ? 8 : 4;
template <class V> struct Piece {
  static constexpr int numbers = kOfPiece<V> * kNumbers<V>, pitch = numbers + 1;
  double of[kWarp * pitch];
};

// The values of a row that a warp adds: those of 32 superblocks from the first one, as numbers.
struct Numbers {
  const double* first;
  int count;
};

// A lane's part of piece `piece`, which is nothing behind the end.
template <class V> __device__ void load_piece(const Numbers& row, int piece, double (&mine)[Piece<V>::numbers]) {
  constexpr int kOf = Piece<V>::numbers, kOfUnit = int(kBlocksOfUnit) * kNumbers<V>;
#pragma unroll
  for (int k = 0; k < kOf; ++k) {
    const int i = k * kWarp + lane_index(), at = i / kOf * kOfUnit + piece * kOf + i % kOf;
    mine[k] = at < row.count ? row.first[at] : 0.0;
  }
}

template <class V> __device__ void hand_round(Piece<V>& shared, const double (&mine)[Piece<V>::numbers]) {
  constexpr int kOf = Piece<V>::numbers;
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kOf; ++k) {
    const int i = k * kWarp + lane_index();
    shared.of[i / kOf * Piece<V>::pitch + i % kOf] = mine[k];
  }
  __syncwarp();
}

// Adds what the lane's superblock has of a piece.
template <class V> __device__ void take_piece(const Piece<V>& shared, V& total) {
#pragma unroll
  for (int c = 0; c < kOfPiece<V>; ++c) {
    V value;
#pragma unroll
    for (int i = 0; i < kNumbers<V>; ++i)
      number(value, i) = shared.of[lane_index() * Piece<V>::pitch + c * kNumbers<V> + i];
    total.take(value);
  }
}

// The sum of a lane's superblock. While a piece is added, the next one is under way.
template <class V> __device__ V sum_of_unit(const Numbers& row, Piece<V>& shared) {
  constexpr int kPieces = int(kBlocksOfUnit) / kOfPiece<V>;
  double mine[Piece<V>::numbers];
  V total{};
  load_piece<V>(row, 0, mine);
#pragma unroll 1
  for (int piece = 1; piece <= kPieces; ++piece) {
    hand_round<V>(shared, mine);
    load_piece<V>({row.first, piece < kPieces ? row.count : 0}, piece, mine);
    take_piece(shared, total);
  }
  return total;
}

// A block adds a row of so many values, a round for 256 superblocks. A thread of the last warp, which has the least to
// do in the last round, adds those of a round while the others begin with the next one; it gets the result.
template <class V> __device__ V sum_of_row(const V* values, int64_t count) {
  __shared__ Piece<V> pieces[kThreads / kWarp];
  __shared__ double sums[2][kThreads * kNumbers<V>];
  constexpr int64_t kOfRound = kThreads * kBlocksOfUnit;
  const int warp = int(threadIdx.x) / kWarp;
  V total{};
  for (int64_t first = 0, round = 0; first < count; first += kOfRound, ++round) {
    double* const mine = sums[round % 2];
    const int64_t begin = first + warp * kWarp * kBlocksOfUnit;
    if (begin < count) {
      const int of_warp = int(min(count - begin, kWarp * kBlocksOfUnit)) * kNumbers<V>;
      V sum = sum_of_unit<V>({reinterpret_cast<const double*>(values + begin), of_warp}, pieces[warp]);
#pragma unroll
      for (int i = 0; i < kNumbers<V>; ++i) mine[int(threadIdx.x) * kNumbers<V> + i] = number(sum, i);
    }
    __syncthreads();
    if (threadIdx.x != kThreads - 1) continue;
    const int units = int(min(int64_t(kThreads), ceil_div(count - first, kBlocksOfUnit)));
#pragma unroll 8
    for (int unit = 0; unit < units; ++unit) {
      V value;
#pragma unroll
      for (int i = 0; i < kNumbers<V>; ++i) number(value, i) = mine[unit * kNumbers<V> + i];
      total.take(value);
    }
  }
  return total;
}

// ---- the tree of a tensor -----------------------------------------------------------------------------------

// `row_length` is no longer than the tensor.
template <class V> struct Tree {
  V* of_blocks;  // what was found; absent where nobody wants it
  int64_t count, row_length, blocks_per_row;

  __host__ __device__ int64_t rows() const { return ceil_div(count, row_length); }
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

// Rows of one superblock are a warp's work, longer ones a block's.
constexpr int64_t kRowsOfUnit = kThreads / kWarp;
__host__ __device__ inline bool is_of_warp(int64_t blocks_per_row) { return blocks_per_row <= kBlocksOfUnit; }

// How many blocks a tree gives work to.
template <class V> int64_t units_to_add(const Tree<V>& tree) {
  if (is_short(tree.blocks_per_row)) return 0;
  return is_of_warp(tree.blocks_per_row) ? ceil_div(tree.rows(), kRowsOfUnit) : tree.rows();
}

template <class V, class Put> __device__ void add_unit(const Adding<V, Put>& adding, int64_t unit) {
  const Tree<V>& tree = adding.tree;
  if (is_of_warp(tree.blocks_per_row)) {
    const int64_t row = unit * kRowsOfUnit + threadIdx.x / kWarp;
    if (row >= tree.rows()) return;
    const V total = in_order(tree.of_blocks + row * tree.blocks_per_row, int(tree.blocks_of(row)));
    if (lane_index() == 0) adding.put(row, total);
  } else {
    const V total = sum_of_row(tree.of_blocks + unit * tree.blocks_per_row, tree.blocks_of(unit));
    if (threadIdx.x == kThreads - 1) adding.put(unit, total);
    __syncthreads();  // the next row's sums come into the same memory
  }
}

template <class Table> __global__ void __launch_bounds__(kThreads, 2) add_kernel(const __grid_constant__ Table table) {
  for (int64_t unit = blockIdx.x; unit < table.units(); unit += gridDim.x) {
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
      : begins_(size_t(tensors)), values_(wanted ? placed(tensors, shape) : 0, launch) {}

  // The tree of tensor i, of that shape.
  Tree<V> of(int64_t i, int64_t count, int64_t row_length) const {
    const int64_t row = row_within(count, row_length), per_row = ceil_div(row, kBlock);
    return {values_.get() ? values_.get() + begins_[size_t(i)] : nullptr, count, row, per_row};
  }

  // Adds up what was noted of blocks: `adding(i)` has the tree of tensor i.
  template <class AddingOf> void add(int64_t tensors, const AddingOf& adding, Launch launch) const {
    if (!values_.get() || !several_) return;
    const auto units = [&](int64_t i) { return units_to_add(adding(i).tree); };
    in_tables<decltype(adding(0))>(tensors, adding, units, [&](const auto& table, int64_t) {
      if (table.units() == 0) return;
      start_blocks(add_kernel<std::decay_t<decltype(table)>>, std::min(table.units(), kMostBlocks), kThreads, launch,
                   table);
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
      values += ceil_div(count, row) * per_row;
      several_ |= !is_short(per_row);
    }
    return values;
  }

  bool several_ = false;  // warps in some row
  std::vector<int64_t> begins_;
  Scratch<V> values_;
};

}  // namespace
}  // namespace hvc
