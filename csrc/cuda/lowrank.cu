// Factors of low rank: a matrix times one of them in one pass, orthonormal lines, and the product with the residual.
#include "rules/lowrank.h"
#include "launch.h"
#include "lowrank_operands.h"
#include "in_rows.h"
#include "visit.h"

namespace hvc {
namespace {

// X is read once for this many components; their sums stay in registers.
constexpr int kFewLines = 4, kMostLines = 8;

template <class T> struct RightOf {
  Matrix<T> x;
  const Work<T>* left;
  Work<T>* partial;  // for each block of rows, as the factor
};

// ---- products ---------------------------------------------------------------------------------------------

// The lines of so many components from one on; after the last one it again, for sums that nobody uses.
template <int kLines, class W> struct Lines {
  const W* of[kLines];
  __device__ Lines(const W* factor, int64_t first, int64_t rank, int64_t length) {
#pragma unroll
    for (int c = 0; c < kLines; ++c) of[c] = factor + min(first + c, rank - 1) * length;
  }
};

// Calls add(i, value_at(i)) for every `step`th i in order, with so many loads under way.
template <int kAtOnce, class ValueAt, class Add>
__device__ void each_value(int64_t begin, int64_t end, int64_t step, const ValueAt& value_at, const Add& add) {
  int64_t i = begin;
  for (; i + (kAtOnce - 1) * step < end; i += kAtOnce * step) {
    decltype(value_at(i)) values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) values[k] = value_at(i + k * step);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) add(i + k * step, values[k]);
  }
#pragma unroll 1
  for (; i < end; i += step) add(i, value_at(i));
}

// What was offered of so many elements, loaded together. `from` is the first; each is `step` elements behind the one
// before and `stride` in memory, and `left` elements are before the end.
template <int kAtOnce, class T> struct Ahead {
  T grads[kAtOnce];
  Work<T> residuals[kAtOnce];

  __device__ void load(const Matrix<T>& x, int64_t from, int64_t stride, int step, int left) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k * step >= left) continue;
      grads[k] = x.grad[from + k * stride];
      residuals[k] = x.residual ? x.residual[from + k * stride] : Work<T>(0);
    }
  }
  __device__ Work<T> value(const Matrix<T>& x, int k) const {
    return x.residual ? to_work(grads[k]) + residuals[k] : to_work(grads[k]);
  }
};

// A warp sums one row, of which there are few, and small blocks leave no multiprocessor without work. The rows of a
// block go through the columns together: its threads bring the factor's part for a tile of them into shared memory.
// There it does not wait for what was asked of memory before, the tile of the gradient that comes next.
constexpr int kRowThreads = 128, kTile = kInFlight * kWarp;
static_assert(kTile == kRowThreads, "a thread brings one column of a tile");
template <int kLines, class W> struct Tiles {
  W of[2][kLines][kTile];  // by turns
};

// Calls add(value, the factor's tile, the column in it) for a lane's elements of the row that begins there.
template <int kLines, class T, class Add>
__device__ void each_of_row(const Matrix<T>& x, int64_t begin, const Lines<kLines, Work<T>>& right,
                            Tiles<kLines, Work<T>>& tiles, int& turn, const Add& add) {
  using W = Work<T>;
  Ahead<kInFlight, T> ahead;
  W of_factor[kLines];
  const auto load = [&](int64_t first) {
    const int left = int(min(x.columns - first, int64_t(kTile)));
#pragma unroll
    for (int c = 0; c < kLines; ++c)
      if (int(threadIdx.x) < left) of_factor[c] = right.of[c][first + threadIdx.x];
    ahead.load(x, begin + first + lane_index(), kWarp, kWarp, left - lane_index());
  };
  load(0);
  for (int64_t first = 0; first < x.columns; first += kTile, turn ^= 1) {
    auto& tile = tiles.of[turn];
    const int left = int(min(x.columns - first, int64_t(kTile))) - lane_index();
#pragma unroll
    for (int c = 0; c < kLines; ++c) tile[c][threadIdx.x] = of_factor[c];
    __syncthreads();  // whoever comes here is done with the tile before, which the next one overwrites
    W values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) values[k] = ahead.value(x, k);
    load(first + kTile);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (k * kWarp < left) add(values[k], tile, k * kWarp + lane_index());
  }
}

template <int kLines, class T>
__global__ void __launch_bounds__(kRowThreads, kLines == kFewLines && sizeof(Work<T>) == 4 ? 10 : 4)
    lowrank_left_kernel(LeftOf<T> o, int64_t* total) {
  using W = Work<T>;
  __shared__ Tiles<kLines, W> tiles;
  constexpr int kRows = kRowThreads / kWarp;
  int nonfinite = 0, turn = 0;
  for (int64_t first = int64_t(blockIdx.x) * kRows; first < o.x.rows; first += int64_t(gridDim.x) * kRows) {
    const int64_t own = first + threadIdx.x / kWarp, row = min(own, o.x.rows - 1);  // after the last one it again
    for (int64_t line = 0; line < o.x.rank; line += kLines) {
      const Lines<kLines, W> right(o.right, line, o.x.rank, o.x.columns);
      W sums[kLines] = {};
      each_of_row(o.x, row * o.x.columns, right, tiles, turn, [&](W value, const auto& tile, int j) {
        nonfinite += line == 0 && own == row && !can_be_kept(value);
#pragma unroll
        for (int c = 0; c < kLines; ++c) sums[c] += value * tile[c][j];
      });
#pragma unroll
      for (int c = 0; c < kLines; ++c) {
        const W sum = combine_warp(sums[c]);
        if (lane_index() == 0 && line + c < o.x.rank && own == row) o.left[(line + c) * o.x.rows + row] = sum;
      }
    }
  }
  add_count(total, nonfinite);
}

// Calls add(i, value) for what was offered at from + i * stride, for every i in order. While so many are added, the
// next ones are under way, and those of the end with the last of them.
template <int kAtOnce, class T, class Add> __device__ void each_offered(const Matrix<T>& x, int64_t from,
                                                                        int64_t stride, int64_t begin, int64_t end,
                                                                        const Add& add) {
  Ahead<kAtOnce, T> ahead;
  const auto load = [&](int64_t first) { ahead.load(x, from + first * stride, stride, 1, int(end - first)); };
  load(begin);
  int64_t first = begin;
  for (; first + kAtOnce <= end; first += kAtOnce) {
    Work<T> values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) values[k] = ahead.value(x, k);
    load(first + kAtOnce);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) add(first + k, values[k]);
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k)
    if (first + k < end) add(first + k, ahead.value(x, k));
}

// A thread sums one column over one block of rows.
template <int kLines, class T> __global__ void __launch_bounds__(kThreads, 2) lowrank_right_kernel(RightOf<T> o) {
  using W = Work<T>;
  const int64_t blocks = ceil_div(o.x.rows, kRowBlock);
  for (int64_t item = first_item(); item < blocks * o.x.columns; item += item_stride()) {
    const int64_t block = item / o.x.columns, j = item % o.x.columns, begin = block * kRowBlock;
    const int64_t end = min(begin + kRowBlock, o.x.rows);
    for (int64_t line = 0; line < o.x.rank; line += kLines) {
      const Lines<kLines, W> left(o.left, line, o.x.rank, o.x.rows);
      W sums[kLines] = {};
      each_offered<kInFlight>(o.x, j, o.x.columns, begin, end, [&](int64_t row, W value) {
#pragma unroll
        for (int c = 0; c < kLines; ++c) sums[c] += value * left.of[c][row];
      });
#pragma unroll
      for (int c = 0; c < kLines; ++c)
        if (line + c < o.x.rank) o.partial[(block * o.x.rank + line + c) * o.x.columns + j] = sums[c];
    }
  }
}

template <class W> __global__ void add_row_blocks_kernel(const W* partial, int64_t blocks, int64_t count, W* right) {
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    W sum = partial[i];
    for (int64_t block = 1; block < blocks; ++block) sum += partial[block * count + i];
    right[i] = sum;
  }
}

struct RowOfMatrix {
  int64_t row, begin;
};

template <class T> __global__ void lowrank_decode_kernel(Product<T> o) {
  using W = Work<T>;
  const int64_t count = o.rows * o.columns;
  const auto of_row = [&](int64_t row) { return RowOfMatrix{row, row * o.columns}; };
  each_go_of(count, {o.columns, count}, of_row, [&](const auto& go) {
    W sums[kOfLane];
    int64_t rows[kOfLane], columns[kOfLane];
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const int64_t at = go.first + lane_index() + k * kWarp, i = go.whole ? at : min(at, count - 1);
      const RowOfMatrix row = go.row_at(i);
      rows[k] = row.row, columns[k] = i - row.begin, sums[k] = W(-0.0);
    }
    for (int64_t c = 0; c < o.rank; ++c) {
      const W *left = o.left + c * o.rows, *right = o.right + c * o.columns;
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) sums[k] += right[columns[k]] * left[rows[k]];
    }
    each_of_go(
        go, [&](int64_t i, const RowOfMatrix&) { return o.residual ? offered(o.grad, o.residual, i) : W(0); },
        [&](const Place& place, W x, const RowOfMatrix&) {
          W sum = sums[place.k];
          if (std::is_same<T, Half>::value) sum = limited(sum, most_sent<T>(o.scale));
          if (o.residual) o.residual[place.i] = limited(x - sum, most_left<W>);
          o.grad[place.i] = from_work<T>(sum * W(o.scale));
        });
  });
}

// ---- lines: one thread block for all of them, as each waits for those before ---------------------------------------

// The most that a block may have: then a thread has 64 registers at most, which the compiler must be told.
constexpr int kLineThreads = 1024;

template <class W> __device__ double line_scale(const W* line, int64_t count) {
  __shared__ unsigned long long largest;
  __syncthreads();
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  MagnitudeBits<W> mine = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const MagnitudeBits<W> bits = magnitude_bits(line[i]);
    mine = bits > mine ? bits : mine;
  }
  atomicMax(&largest, static_cast<unsigned long long>(mine));
  __syncthreads();
  return unit_scale(magnitude_of(MagnitudeBits<W>(largest)));
}

template <class W> __device__ double line_dot(const W* a, const W* b, int64_t count, double* block_sums) {
  __shared__ double total;
  const int64_t blocks = ceil_div(count, kBlock);
  __syncthreads();
  for (int64_t block = threadIdx.x / kWarp; block < blocks; block += blockDim.x / kWarp) {
    const int64_t begin = block * kBlock, end = begin + kBlock < count ? begin + kBlock : count;
    double sum = 0;
    each_value<kOfLane>(
        begin + lane_index(), end, kWarp, [&](int64_t i) { return double(a[i]) * double(b[i]); },
        [&](int64_t, double product) { sum += product; });
    sum = combine_warp(sum);
    if (lane_index() == 0) block_sums[block] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    total = 0;
    for (int64_t block = 0; block < blocks; ++block) total += block_sums[block];
  }
  __syncthreads();
  return total;
}

// Makes every element of a line what `made` says of its number.
template <class W, class Made> __device__ void make_line(W* line, int64_t count, const Made& made) {
  each_value<kInFlight>(threadIdx.x, count, blockDim.x, made, [&](int64_t i, W value) { line[i] = value; });
}
template <class W> __device__ void scale_line(W* line, double scale, int64_t count) {
  make_line(line, count, [&](int64_t i) { return scale == 0 ? W(0) : W(double(line[i]) * scale); });
}

template <class W> __global__ void __launch_bounds__(kLineThreads)
    orthonormalise_kernel(W* lines, int64_t count, int64_t rank, double* block_sums) {
  for (int64_t c = 0; c < rank; ++c) {
    W* line = lines + c * count;
    const double scale = line_scale(line, count);
    scale_line(line, scale, count);
    if (scale == 0) continue;
    const double before = line_dot(line, line, count, block_sums);
    for (int64_t k = 0; k < 2 * c; ++k) {
      const W* other = lines + k % c * count;
      const double share = line_dot(other, line, count, block_sums);
      make_line(line, count, [&](int64_t i) { return W(double(line[i]) - double(other[i]) * share); });
    }
    scale_line(line, normalising<W>(before, line_dot(line, line, count, block_sums)), count);
  }
}

template <class W> __global__ void __launch_bounds__(kLineThreads)
    start_kernel(const W* kept, int64_t columns, int64_t rank, Stream key, int64_t offset, W* right) {
  for (int64_t c = blockIdx.x; c < rank; c += gridDim.x) {
    const int64_t begin = c * columns;
    const double scale = line_scale(kept + begin, columns);
    for (int64_t i = begin + threadIdx.x; i < begin + columns; i += blockDim.x)
      right[i] = scale == 0 ? W(uniform(key, offset + i)) : W(double(kept[i]) * scale);
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void lowrank_start(const void* kept, Dtype dtype, int64_t columns, int64_t rank, const Stream* key, int64_t offset,
                   void* right, Launch launch) {
  const int64_t blocks = std::min(rank, kMostBlocks);
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    start_blocks(start_kernel<W>, blocks, kLineThreads, launch, static_cast<const W*>(kept), columns, rank, *key,
                 offset, static_cast<W*>(right));
  });
}

void lowrank_left(const void* grad, const void* residual, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                  const void* right, void* left, int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const LeftOf<T> o{matrix<T>(grad, residual, rows, columns, rank), static_cast<const Work<T>*>(right),
                      static_cast<Work<T>*>(left)};
    const auto kernel = rank <= kFewLines ? lowrank_left_kernel<kFewLines, T> : lowrank_left_kernel<kMostLines, T>;
    if (rows > 0)
      start_blocks(kernel, std::min(ceil_div(rows * kWarp, kRowThreads), kMostBlocks), kRowThreads, launch, o,
                   nonfinite);
  });
}

void lowrank_orthonormalise(void* lines, Dtype dtype, int64_t count, int64_t rank, Launch launch) {
  const Scratch<double> block_sums(ceil_div(count, kBlock), launch);
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    start_blocks(orthonormalise_kernel<W>, 1, kLineThreads, launch, static_cast<W*>(lines), count, rank,
                 block_sums.get());
  });
}

void lowrank_right(const void* grad, const void* residual, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                   const void* left, void* right, Launch launch) {
  const int64_t blocks = ceil_div(rows, kRowBlock), count = rank * columns;
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Scratch<W> partial(blocks * count, launch);
    const RightOf<T> o{matrix<T>(grad, residual, rows, columns, rank), static_cast<const W*>(left), partial.get()};
    const auto kernel = rank <= kFewLines ? lowrank_right_kernel<kFewLines, T> : lowrank_right_kernel<kMostLines, T>;
    start(kernel, blocks * columns, launch, o);
    start(add_row_blocks_kernel<W>, count, launch, static_cast<const W*>(partial.get()), blocks, count,
          static_cast<W*>(right));
  });
}

void lowrank_decode(const void* left, const void* right, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                    double scale, void* grad, void* residual, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Product<T> o{static_cast<const W*>(left), static_cast<const W*>(right), rows, columns, rank, scale,
                       static_cast<T*>(grad),       static_cast<W*>(residual)};
    start(lowrank_decode_kernel<T>, units_of_goes(rows * columns) * kWarp, launch, o);
  });
}

}  // namespace hvc
