// Plain numbers: offer, add, decode. And the triad that measures the memory.
#include "rules/dense.h"
#include "in_rows.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

template <class Out, class T, class Table>
__global__ void offer_kernel(const __grid_constant__ Table table, Dtype kept_dtype, int64_t* nonfinite) {
  constexpr int64_t kMost = in_goes(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const DenseOffered& o = table.items[item];
    const auto* grad = static_cast<const T*>(o.grad);
    const auto residual = kept_array<Work<T>>(o.residual, kept_dtype);
    const int64_t begin = (unit - table.begins[item]) * kMost;
    int64_t bad = 0;
    each_go(begin, min(begin + kMost, o.count), {o.count, o.count}, NoRows(), [&](const auto& go) {
      each_of_go(
          go, [&](int64_t i, NoRows) { return residual.at ? to_work(grad[i]) + residual[i] : to_work(grad[i]); },
          [&](const Place& place, Work<T> x, NoRows) {
            const Out out = from_work<Out>(x);
            static_cast<Out*>(o.out)[place.i] = out;
            bad += !is_finite(out);
          });
    });
    add_count(nonfinite + item, bad);
  }
}

template <class T> __global__ void add_kernel(T* into, const T* other, int64_t count) {
  each_go_of(count, [&](const auto& go) {
    each_of_go(
        go, [&](int64_t i, NoRows) { return Two<T>{into[i], other[i]}; },
        [&](const Place& place, const Two<T>& x, NoRows) {
          into[place.i] = from_work<T>(to_work(x.mine) + to_work(x.other));
        });
  });
}

template <class Out, class T, class Table>
__global__ void decode_kernel(const __grid_constant__ Table table, Dtype kept_dtype, Wider<T, Out> factor) {
  each_loaded_of(
      table, [](const DenseDecoded& d, int64_t i) { return static_cast<const T*>(d.payload)[i]; },
      [&](const DenseDecoded& d, int64_t i, T value) {
        static_cast<Out*>(d.grad)[i] = from_work<Out>(Wider<T, Out>(to_work(value)) * factor);
        if (d.residual && kept_dtype == kBFloat16)
          static_cast<BFloat16*>(d.residual)[i] = {};
        else if (d.residual)
          static_cast<Work<Out>*>(d.residual)[i] = 0;
      });
}

template <class T> struct Absorbed {
  T grad;
  Work<T> residual, momentum;
};

template <class T>
__global__ void absorb_kernel(T* grad, Work<T>* residual, Work<T>* momentum, Work<T> factor, int64_t count) {
  using W = Work<T>;
  each_go_of(count, [&](const auto& go) {
    each_of_go(
        go, [&](int64_t i, NoRows) { return Absorbed<T>{grad[i], residual[i], momentum ? momentum[i] : W(0)}; },
        [&](const Place& place, const Absorbed<T>& x, NoRows) {
          W more = to_work(x.grad);
          if (momentum) momentum[place.i] = more = bounded(with_momentum(factor, x.momentum, more));
          residual[place.i] = bounded(W(x.residual + more));
          grad[place.i] = T{};
        });
  });
}

__global__ void triad_kernel(float* a, const float* b, const float* c, float s, int64_t count) {
  each_go_of(count, [&](const auto& go) {
    each_of_go(
        go, [&](int64_t i, NoRows) { return Two<float>{b[i], c[i]}; },
        [&](const Place& place, const Two<float>& x, NoRows) { a[place.i] = x.mine + s * x.other; });
  });
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void dense_offer(const DenseOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, Dtype out_dtype,
                 int64_t* nonfinite, Launch launch) {
  const auto units = units_of_goes(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    visit(out_dtype, [&](auto out_type) {
      using Out = typename decltype(out_type)::type;
      in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t first) {
        start(offer_kernel<Out, T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, kept_dtype,
              nonfinite + first);
      });
    });
  });
}

void dense_add(void* into, const void* other, Dtype dtype, int64_t count, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    start(add_kernel<T>, units_of_goes(count) * kWarp, launch, static_cast<T*>(into), static_cast<const T*>(other),
          count);
  });
}

void dense_decode(const DenseDecoded* tensors, int64_t tensor_count, Dtype payload_dtype, Dtype grad_dtype,
                  Dtype kept_dtype, double scale, Launch launch) {
  const auto units = units_in_one_go(tensors, tensor_count);
  visit(payload_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    visit(grad_dtype, [&](auto grad_type) {
      using Out = typename decltype(grad_type)::type;
      in_tables_of(tensors, tensor_count, units, [&](const auto& table, int64_t) {
        start(decode_kernel<Out, T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, kept_dtype,
              Wider<T, Out>(scale));
      });
    });
  });
}

void absorb(void* grad, void* residual, void* momentum, double factor, Dtype dtype, int64_t count, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    start(absorb_kernel<T>, units_of_goes(count) * kWarp, launch, static_cast<T*>(grad), static_cast<W*>(residual),
          static_cast<W*>(momentum), W(factor), count);
  });
}

void triad(float* a, const float* b, const float* c, float s, int64_t count, Launch launch) {
  start(triad_kernel, units_of_goes(count) * kWarp, launch, a, b, c, s, count);
}

}  // namespace hvc
