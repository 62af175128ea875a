// Adam's second moment as its own step is to find it.
#include "rules/adam.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct Read {
  T first, grad;
  Work<T> square;
};

template <class T, class Table>
__global__ void hold_kernel(const __grid_constant__ Table table, AdamScales<Work<T>> scales) {
  using W = Work<T>;
  each_loaded_of(
      table,
      [](const AdamHeld& h, int64_t i) {
        return Read<T>{static_cast<const T*>(h.first)[i], static_cast<const T*>(h.grad)[i],
                       static_cast<const W*>(h.square)[i]};
      },
      [&](const AdamHeld& h, int64_t i, const Read<T>& r) {
        const W floor = h.floors ? static_cast<const W*>(h.floors)[row_of(i, h.row_length, h.count)] : W(0);
        static_cast<T*>(h.second)[i] =
            from_work<T>(adam_held(to_work(r.first), to_work(r.grad), r.square, floor, scales));
      });
}

}  // namespace

void adam_hold(const AdamHeld* tensors, int64_t tensor_count, Dtype dtype, AdamScales<double> scales, Launch launch) {
  const auto units = units_in_one_go(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const AdamScales<W> s{W(scales.share), W(scales.least), W(scales.wanted), W(scales.coming), W(scales.taken)};
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t) {
      start(hold_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, s);
    });
  });
}

}  // namespace hvc
