// Multiples of the norms of rows: what decoding the codes of rules/level.h and rules/octave.h has in common.
#pragma once
#include "rules/dither.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T, class Tensor> struct Multiples {
  decltype(Tensor::codes) codes;
  const Work<T>* norms;
  int64_t count, row_length;
  T* grad;
};

template <class T, class Table, class Factor>
__global__ void multiples_kernel(const __grid_constant__ Table table, Factor factor, double scale) {
  using W = Work<T>;
  each_loaded_of(
      table, [&](const auto& m, int64_t i) { return factor(m.codes, i); },
      [&](const auto& m, int64_t i, auto value) {
        m.grad[i] = from_work<T>(decoded(value, W(scale), m.norms[row_of(i, m.row_length, m.count)]));
      });
}

// Writes (factor(codes, i) * scale) * norm over the gradients.
template <class Tensor, class Factor> void decode_multiples(const Tensor* tensors, int64_t tensor_count, Dtype dtype,
                                                            Factor factor, double scale, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Item = Multiples<T, Tensor>;
    const auto item = [&](int64_t i) {
      const Tensor& t = tensors[i];
      return Item{t.codes, static_cast<const Work<T>*>(t.norms), t.count, t.row_length, static_cast<T*>(t.grad)};
    };
    in_tables<Item>(tensor_count, item, goes_of(tensors, tensor_count), [&](const auto& table, int64_t) {
      using Table = std::decay_t<decltype(table)>;
      start(multiples_kernel<T, Table, Factor>, table.units() * kWarp, launch, table, factor, scale);
    });
  });
}

}  // namespace
}  // namespace hvc
