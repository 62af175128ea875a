// Adam's step by a second moment that is held: what its own formula is to find, and all of it.
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

template <class T> struct Standing {
  T weight, first, grad;
  Work<T> square;
};

template <class T, class Table>
__global__ void step_kernel(const __grid_constant__ Table table, AdamStep<Work<T>> step) {
  using W = Work<T>;
  each_loaded_of(
      table,
      [](const AdamStepped& t, int64_t i) {
        return Standing<T>{static_cast<const T*>(t.weight)[i], static_cast<const T*>(t.first)[i],
                           static_cast<const T*>(t.grad)[i], static_cast<const W*>(t.square)[i]};
      },
      [&](const AdamStepped& t, int64_t i, const Standing<T>& s) {
        const W floor = t.floors ? static_cast<const W*>(t.floors)[row_of(i, t.row_length, t.count)] : W(0);
        const auto moved = adam_moved(to_work(s.weight), to_work(s.first), to_work(s.grad), s.square, floor, step);
        static_cast<T*>(t.weight)[i] = from_work<T>(moved.weight);
        static_cast<T*>(t.first)[i] = from_work<T>(moved.first);
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

void adam_step(const AdamStepped* tensors, int64_t tensor_count, Dtype dtype, AdamStep<double> step, Launch launch) {
  const auto units = units_in_one_go(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t) {
      start(step_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, step.as<Work<T>>());
    });
  });
}

}  // namespace hvc
