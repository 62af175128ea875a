// Plain numbers: offer, add, decode. And the triad that measures the memory.
#include "hvc/dense.h"

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#include <atomic>

#define HVC_BODY "dense_body.h"
#include "foreach_isa.h"

namespace hvc {

void dense_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, void* out, Dtype out_dtype,
                 int64_t* nonfinite, Launch launch) {
  std::atomic<int64_t> total{0};
  visit(dtype, [&](auto type) {
    visit(out_dtype, [&](auto out_type) {
      using T = typename decltype(type)::type;
      using Out = typename decltype(out_type)::type;
      const auto range = HVC_CHOOSE(offer<Out, T>);
      const bool streamed = streams(count * int64_t(sizeof(Out)));
      const int64_t bytes = count * int64_t(sizeof(T) + sizeof(Work<T>) + sizeof(Out));
      parallel_for(launch.threads, count, bytes, [&](int64_t, int64_t first, int64_t last) {
        total += range(static_cast<const T*>(grad), static_cast<const Work<T>*>(residual), static_cast<Out*>(out),
                       streamed, first, last);
      });
    });
  });
  *nonfinite = total;
}

void dense_add(void* into, const void* other, Dtype dtype, int64_t count, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(add<T>);
    parallel_for(launch.threads, count, 3 * count * int64_t(sizeof(T)), [&](int64_t, int64_t first, int64_t last) {
      range(static_cast<T*>(into), static_cast<const T*>(other), first, last);
    });
  });
}

void dense_decode(const void* payload, Dtype payload_dtype, int64_t count, double factor, void* grad, Dtype grad_dtype,
                  void* residual, Launch launch) {
  visit(payload_dtype, [&](auto type) {
    visit(grad_dtype, [&](auto grad_type) {
      using T = typename decltype(type)::type;
      using Out = typename decltype(grad_type)::type;
      const auto range = HVC_CHOOSE(scale<Out, T>);
      const bool streamed = streams(count * int64_t(sizeof(Out)));
      const int64_t bytes = count * int64_t(sizeof(T) + sizeof(Out) + sizeof(Work<Out>));
      parallel_for(launch.threads, count, bytes, [&](int64_t, int64_t first, int64_t last) {
        range(static_cast<const T*>(payload), Wider<T, Out>(factor), static_cast<Out*>(grad), streamed, first, last);
        if (residual) memset(static_cast<Work<Out>*>(residual) + first, 0, size_t(last - first) * sizeof(Work<Out>));
      });
    });
  });
}

void dense_offer_all(const DenseOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype out_dtype,
                     int64_t* nonfinite, Launch launch) {
  for (int64_t i = 0; i < tensor_count; ++i) {
    const DenseOffered& t = tensors[i];
    dense_offer(t.grad, t.residual, dtype, t.count, t.out, out_dtype, nonfinite + i, launch);
  }
}

void dense_decode_all(const DenseDecoded* tensors, int64_t tensor_count, Dtype payload_dtype, double scale,
                      Dtype grad_dtype, Launch launch) {
  for (int64_t i = 0; i < tensor_count; ++i) {
    const DenseDecoded& t = tensors[i];
    dense_decode(t.payload, payload_dtype, t.count, scale, t.grad, grad_dtype, t.residual, launch);
  }
}

void absorb(void* grad, void* residual, void* momentum, double factor, Dtype dtype, int64_t count, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto range = HVC_CHOOSE(absorb<T>);
    const int64_t bytes = 2 * count * int64_t(sizeof(T) + sizeof(W) * (momentum ? 2 : 1));
    parallel_for(launch.threads, count, bytes, [&](int64_t, int64_t first, int64_t last) {
      range(static_cast<T*>(grad), static_cast<W*>(residual), static_cast<W*>(momentum), W(factor), first, last);
    });
  });
}

void triad(float* a, const float* b, const float* c, float s, int64_t count, Launch launch) {
  const auto range = HVC_CHOOSE(add_scaled);
  parallel_for(launch.threads, count, 12 * count,
               [&](int64_t, int64_t first, int64_t last) { range(a, b, c, s, streams(4 * count), first, last); });
}

}  // namespace hvc
