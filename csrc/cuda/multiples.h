// Multiples of the norms of rows: what decoding the codes of rules/uniform.h and rules/exponential.h has in common.
#pragma once
#include "rules/dither.h"
#include "in_rows.h"
#include "visit.h"

namespace hvc {
namespace {

// A factor is load(codes, i), and then what that stands for.
template <class T, class Table, class Factor>
__global__ void multiples_kernel(const __grid_constant__ Table table, Factor factor, double scale) {
  using W = Work<T>;
  each_go_of(
      table, OwnRows(), [](const auto& m, int64_t row) { return static_cast<const W*>(m.norms)[row]; },
      [&](const auto& m, const auto& go) {
        each_of_go(
            go, [&](int64_t i, W) { return factor.load(m.codes, i); },
            [&](const Place& place, auto code, W norm) {
              static_cast<T*>(m.grad)[place.i] = from_work<T>(decoded(factor(code, place.i), W(scale), norm));
            });
      });
}

// Writes (factor * scale) * norm over the gradients.
template <class Tensor, class Factor> void decode_multiples(const Tensor* tensors, int64_t tensor_count, Dtype dtype,
                                                            Factor factor, double scale, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units_of_goes(tensors, tensor_count), [&](const auto& table, int64_t) {
      using Table = std::decay_t<decltype(table)>;
      start(multiples_kernel<T, Table, Factor>, table.units() * kWarp, launch, table, factor, scale);
    });
  });
}

}  // namespace
}  // namespace hvc
