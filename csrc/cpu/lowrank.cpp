// Factors of low rank: a matrix times one of them in one pass, orthonormal lines, and the product with the residual.
#include <cmath>

#include "rules/lowrank.h"
#include "kernels.h"
#include "lowrank_operands.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

// Columns whose sums stay in the cache while rows go by: so many, or fewer where some threads would have none. Still
// narrower ones, and those of a small matrix, cost what another thread saves. Changes no bit.
constexpr int64_t kTile = 1024, kLeastTile = 256, kTileUnit = 64, kNarrowBytes = 4 * kBytesPerThread;

int64_t tile_for(int64_t columns, int64_t bytes, int threads) {
  const int64_t share = ceil_div(columns, std::max<int64_t>(1, std::min<int64_t>(threads, bytes / kNarrowBytes)));
  return std::clamp(ceil_div(share, kTileUnit) * kTileUnit, kLeastTile, kTile);
}

template <class T> struct RightOf {
  Matrix<T> x;
  const Work<T>* left;
  Work<T>* right;
  int64_t tile;
};

template <class T> int64_t bytes_read(const Matrix<T>& x) {
  return x.rows * x.columns * int64_t(sizeof(T) + (x.residual ? sizeof(Work<T>) : 0));
}

}  // namespace
}  // namespace hvc

#define HVC_BODY "lowrank_body.h"
#include "foreach_isa.h"

namespace hvc {

void lowrank_start(const void* kept, Dtype dtype, int64_t columns, int64_t rank, const Stream* key, int64_t offset,
                   void* right, Launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    HVC_CHOOSE(start_lines<W>)(static_cast<const W*>(kept), columns, rank, *key, offset, static_cast<W*>(right));
  });
}

void lowrank_left(const void* grad, const void* residual, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                  const void* right, void* left, int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const LeftOf<T> o{matrix<T>(grad, residual, rows, columns, rank), static_cast<const Work<T>*>(right),
                      static_cast<Work<T>*>(left)};
    const auto range = HVC_CHOOSE(lowrank_left<T>);
    *nonfinite = parallel_sum(launch.threads, rows, bytes_read(o.x),
                              [&](int64_t first, int64_t last) { return range(o, first, last); });
  });
}

void lowrank_orthonormalise(void* lines, Dtype dtype, int64_t count, int64_t rank, Launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    HVC_CHOOSE(orthonormalise<W>)(static_cast<W*>(lines), count, rank);
  });
}

void lowrank_right(const void* grad, const void* residual, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                   const void* left, void* right, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Matrix<T> x = matrix<T>(grad, residual, rows, columns, rank);
    const int64_t bytes = bytes_read(x), tile = tile_for(columns, bytes, launch.threads);
    const RightOf<T> o{x, static_cast<const Work<T>*>(left), static_cast<Work<T>*>(right), tile};
    const auto range = HVC_CHOOSE(lowrank_right<T>);
    parallel_for(launch.threads, ceil_div(columns, tile), bytes,
                 [&](int64_t first, int64_t last) { range(o, first, last); });
  });
}

void lowrank_decode(const void* left, const void* right, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                    double scale, void* grad, void* residual, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Product<T> o{static_cast<const W*>(left), static_cast<const W*>(right), rows, columns, rank, scale,
                       static_cast<T*>(grad),       static_cast<W*>(residual)};
    const auto range = HVC_CHOOSE(lowrank_decode<T>);
    const int64_t bytes = rows * columns * int64_t(2 * sizeof(T) + (residual ? 2 * sizeof(W) : 0));
    parallel_for(launch.threads, rows, bytes, [&](int64_t first, int64_t last) { range(o, first, last); });
  });
}

}  // namespace hvc
