// Rows of elements on CUDA: the tree of rules/tree.h in blocks that warps sum, and bits that warps vote on.
#pragma once
#include <vector>

#include "rules/tree.h"
#include "launch.h"
#include "table.h"

namespace hvc {
namespace {

template <class T> __device__ Work<T> offered(const T* grad, const Work<T>* residual, int64_t i) {
  const Work<T> x = to_work(grad[i]);
  return residual ? x + residual[i] : x;
}

// Divisions of 64 bits are slow, and most tensors need none.
__device__ inline int64_t row_of(int64_t i, int64_t row_length, int64_t count) {
  if (row_length >= count) return 0;
  return count <= 0xffffffff ? int64_t(uint32_t(i) / uint32_t(row_length)) : i / row_length;
}

// Blocks of all rows, in order; rules/tree.h says what a block is.
struct Blocks {
  int64_t per_row, total;
};
__host__ __device__ inline Blocks blocks_of(int64_t count, int64_t row_length) {
  const int64_t per_row = ceil_div(row_length, kBlock);
  return {per_row, count / row_length * per_row + ceil_div(count % row_length, kBlock)};
}

// One of them: its row, and its elements.
struct BlockOfRow {
  int64_t row, begin, end;
};
__device__ inline BlockOfRow block_of_row(int64_t block, int64_t count, int64_t row_length) {
  const int64_t per_row = ceil_div(row_length, kBlock), row = block / per_row;
  const int64_t begin = row * row_length + block % per_row * kBlock;
  return {row, begin, min(min(begin + kBlock, (row + 1) * row_length), count)};
}

// A warp's part of consecutive elements: lane by lane, as the sums and the votes want them, with this many loads of
// each lane under way. Loads of 16 bytes would put neighbours into one lane, and need an alignment that gradients lack.
constexpr int kInFlight = 4;

// How many elements of no particular order a warp takes in one go: more where there are several tensors, as it looks
// for theirs first.
__host__ __device__ constexpr int64_t in_one_go(bool several) { return (several ? 4 : 1) * kInFlight * kWarp; }

// Calls use(i, load(i)) for a lane's part of the elements of [first, last), with several loads under way.
template <class Load, class Use>
__device__ void each_loaded(int64_t first, int64_t last, const Load& load, const Use& use) {
  for (int64_t begin = first; begin < last; begin += kInFlight * kWarp) {
    decltype(load(first)) values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = begin + k * kWarp + lane_index();
      if (i < last) values[k] = load(i);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = begin + k * kWarp + lane_index();
      if (i < last) use(i, values[k]);
    }
  }
}

// The units of work on the elements of tensors, in no particular order.
template <class Tensor> auto units_in_one_go(const Tensor* tensors, int64_t tensor_count) {
  return [=](int64_t i) { return ceil_div(tensors[i].count, in_one_go(tensor_count > 1)); };
}

// Calls use(tensor, i, load(tensor, i)) for a lane's part of all of them.
template <class Table, class Load, class Use>
__device__ void each_loaded_of(const Table& table, const Load& load, const Use& use) {
  constexpr int64_t kMost = in_one_go(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const auto& tensor = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost;
    each_loaded(
        first, min(first + kMost, tensor.count), [&](int64_t i) { return load(tensor, i); },
        [&](int64_t i, const auto& value) { use(tensor, i, value); });
  }
}

template <class T> struct Loaded {
  Work<T> x[kInFlight];  // 0 behind the end
};
// Of gradients that are divided first, where there is something to divide by.
template <class T> __device__ Loaded<T> load_groups(const T* grad, const Work<T>* residual, int64_t begin, int64_t end,
                                                    const Work<T>* divisor = nullptr) {
  Loaded<T> loaded;
  T x[kInFlight];
  Work<T> by[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t i = begin + k * kWarp + lane_index();
    x[k] = i < end ? grad[i] : T{};
    loaded.x[k] = residual && i < end ? residual[i] : Work<T>(0);
    by[k] = divisor && i < end ? divisor[i] : Work<T>(1);
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const bool inside = begin + k * kWarp + lane_index() < end;
    const Work<T> mine = divisor ? to_work(x[k]) / by[k] : to_work(x[k]);
    loaded.x[k] = !inside ? Work<T>(0) : residual ? mine + loaded.x[k] : mine;
  }
  return loaded;
}

// Rows that end with whole halves share none with the next one.
__device__ inline bool has_whole_halves(int64_t count, int64_t row_length) {
  return row_length % kWarp == 0 || row_length >= count;
}

// Writes 32 bits from element `begin` on, in cleared memory where rows do not begin at a multiple of 32.
__device__ inline void put_bits(uint32_t* halves, int64_t begin, uint32_t bits, bool whole_halves) {
  const int shift = int(begin % kWarp);
  if (whole_halves) {
    halves[begin / kWarp] = bits;
    return;
  }
  atomicOr(halves + begin / kWarp, bits << shift);
  if (shift != 0 && bits >> (kWarp - shift) != 0) atomicOr(halves + begin / kWarp + 1, bits >> (kWarp - shift));
}

template <class W> __device__ W combine_warp(W lane) {
  for (int half = kWarp / 2; half > 0; half /= 2) lane += __shfl_down_sync(kAllLanes, lane, half);
  return lane;
}

// A warp adds values in index order, from 0, or finds the largest: 32 are loaded at once, every lane gets the result.
template <bool kLargest> __device__ double in_order(const double* values, int64_t begin, int64_t end) {
  double total = 0;
  for (int64_t first = begin; first < end; first += kWarp) {
    const double mine = first + lane_index() < end ? values[first + lane_index()] : 0.0;
#pragma unroll
    for (int lane = 0; lane < kWarp; ++lane) {
      const double value = __shfl_sync(kAllLanes, mine, lane);
      total = kLargest ? max(total, value) : total + value;
    }
  }
  return total;
}

// What is added up of a tensor, or searched for the largest: of every row `parts_per_row` parts, so many at a time.
template <class Put> struct Adding {
  const double* parts;
  int64_t parts_per_row, parts_total, at_a_time, groups_per_row;
  Put put;  // takes what was found of each group
};

template <bool kLargest, class Table> __global__ void add_kernel(const __grid_constant__ Table table) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const auto& a = table.items[item];
    const int64_t group = unit - table.begins[item], row = group / a.groups_per_row * a.parts_per_row;
    const int64_t begin = row + group % a.groups_per_row * a.at_a_time;
    const int64_t end = min(min(begin + a.at_a_time, row + a.parts_per_row), a.parts_total);
    const double found = in_order<kLargest>(a.parts, begin, end);
    if (lane_index() == 0) a.put(group, canonical(found));
  }
}

// A number for each row, as it is found.
template <class Out> struct Plain {
  Out* out;
  __device__ void operator()(int64_t row, double found) const { out[row] = Out(found); }
};

template <bool kLargest, class Put, class ItemOf, class UnitsOf>
void add_all(int64_t count, ItemOf item, UnitsOf units, Launch launch) {
  in_tables<Adding<Put>>(count, item, units, [&](const auto& table, int64_t) {
    start(add_kernel<kLargest, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table);
  });
}

// Sums of rows, or the largest, from those of their blocks, in the order of the tree: for all tensors at once.
// `units` is the shape of a tensor, `first_block` says where its blocks are among those of all, `put` takes its sums.
template <bool kLargest, class Put, class UnitsOf, class FirstBlock, class PutOf>
void add_blocks(int64_t count, UnitsOf units, const double* of_blocks, FirstBlock first_block, PutOf put,
                Launch launch) {
  constexpr int64_t kBlocks = kSuperblock / kBlock;
  std::vector<int64_t> first_unit(size_t(count) + 1);
  bool long_rows = false;
  for (int64_t i = 0; i < count; ++i) {
    first_unit[size_t(i) + 1] = first_unit[size_t(i)] + units(i).total;
    long_rows |= units(i).per_row > 1;
  }
  const Scratch<double> of_units(long_rows ? first_unit[size_t(count)] : 0, launch);
  const auto blocks = [&](int64_t i) { return blocks_of(units(i).count, units(i).row_length); };
  const auto rows = [&](int64_t i) { return ceil_div(units(i).count, units(i).row_length); };
  if (long_rows) {
    const auto item = [&](int64_t i) {
      return Adding<Plain<double>>{of_blocks + first_block(i),
                                   blocks(i).per_row,
                                   blocks(i).total,
                                   kBlocks,
                                   units(i).per_row,
                                   {of_units.get() + first_unit[size_t(i)]}};
    };
    add_all<kLargest, Plain<double>>(count, item, [&](int64_t i) { return units(i).total; }, launch);
  }
  // A row of one superblock has its sum with that of the superblock.
  const auto item = [&](int64_t i) {
    const int64_t per_row = long_rows ? units(i).per_row : blocks(i).per_row;
    return Adding<Put>{long_rows ? of_units.get() + first_unit[size_t(i)] : of_blocks + first_block(i),
                       per_row,
                       long_rows ? units(i).total : blocks(i).total,
                       per_row,
                       1,
                       put(i)};
  };
  add_all<kLargest, Put>(count, item, rows, launch);
}

}  // namespace
}  // namespace hvc
