// Multiples of the norms of rows: what decoding the codes of rules/uniform.h and rules/exponential.h has in common.
#pragma once
#include "rules/dither.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T, class Table, class Factor>
__global__ void multiples_kernel(const __grid_constant__ Table table, Factor factor, double scale) {
  using W = Work<T>;
  each_loaded_of(
      table, [&](const auto& m, int64_t i) { return factor(m.codes, i); },
      [&](const auto& m, int64_t i, auto value) {
        const W norm = static_cast<const W*>(m.norms)[row_of(i, m.row_length, m.count)];
        static_cast<T*>(m.grad)[i] = from_work<T>(decoded(value, W(scale), norm));
      });
}

// Writes (factor(codes, i) * scale) * norm over the gradients.
template <class Tensor, class Factor> void decode_multiples(const Tensor* tensors, int64_t tensor_count, Dtype dtype,
                                                            Factor factor, double scale, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units_in_one_go(tensors, tensor_count), [&](const auto& table, int64_t) {
      using Table = std::decay_t<decltype(table)>;
      start(multiples_kernel<T, Table, Factor>, table.units() * kWarp, launch, table, factor, scale);
    });
  });
}

}  // namespace
}  // namespace hvc
