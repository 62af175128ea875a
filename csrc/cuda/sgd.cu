// SGD's step.
#include "rules/sgd.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct Standing {
  T weight, buffer, grad;
};

template <class T, class Table>
__global__ void step_kernel(const __grid_constant__ Table table, SgdStep<Work<T>> step) {
  each_loaded_of(
      table,
      [](const SgdStepped& t, int64_t i) {
        return Standing<T>{static_cast<const T*>(t.weight)[i], t.buffer ? static_cast<const T*>(t.buffer)[i] : T{},
                           static_cast<const T*>(t.grad)[i]};
      },
      [&](const SgdStepped& t, int64_t i, const Standing<T>& s) {
        const auto moved = sgd_moved(to_work(s.weight), to_work(s.buffer), to_work(s.grad), t.buffer != nullptr, step);
        static_cast<T*>(t.weight)[i] = from_work<T>(moved.weight);
        if (t.buffer) static_cast<T*>(t.buffer)[i] = from_work<T>(moved.buffer);
      });
}

}  // namespace

void sgd_step(const SgdStepped* tensors, int64_t tensor_count, Dtype dtype, SgdStep<double> step, Launch launch) {
  const auto units = units_in_one_go(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t) {
      start(step_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, step.as<Work<T>>());
    });
  });
}

}  // namespace hvc
