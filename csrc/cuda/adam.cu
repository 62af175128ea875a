// Adam's second moment as its own step is to find it.
#include "rules/adam.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct Held {
  T* second;
  const T *first, *grad;
  const Work<T>*square, *floors;
  int64_t count, row_length;
};

template <class T> struct Read {
  T first, grad;
  Work<T> square;
};

template <class T, class Table>
__global__ void hold_kernel(const __grid_constant__ Table table, AdamScales<Work<T>> scales) {
  each_loaded_of(
      table, [](const Held<T>& h, int64_t i) { return Read<T>{h.first[i], h.grad[i], h.square[i]}; },
      [&](const Held<T>& h, int64_t i, const Read<T>& r) {
        const Work<T> floor = h.floors ? h.floors[row_of(i, h.row_length, h.count)] : Work<T>(0);
        h.second[i] = from_work<T>(adam_held(to_work(r.first), to_work(r.grad), r.square, floor, scales));
      });
}

}  // namespace

void adam_hold(const AdamHeld* tensors, int64_t tensor_count, Dtype dtype, AdamScales<double> scales, Launch launch) {
  const auto units = goes_of(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const AdamScales<W> s{W(scales.share), W(scales.least), W(scales.wanted), W(scales.coming), W(scales.taken)};
    const auto item = [&](int64_t i) {
      const AdamHeld& t = tensors[i];
      return Held<T>{static_cast<T*>(t.second),
                     static_cast<const T*>(t.first),
                     static_cast<const T*>(t.grad),
                     static_cast<const W*>(t.square),
                     static_cast<const W*>(t.floors),
                     t.count,
                     t.row_length};
    };
    in_tables<Held<T>>(tensor_count, item, units, [&](const auto& table, int64_t) {
      start(hold_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, s);
    });
  });
}

}  // namespace hvc
