// Plain numbers: offer, add, decode. And the triad that measures the memory.
#include "rules/dense.h"
#include "rules/kept.h"

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#define HVC_BODY "dense_body.h"
#include "foreach_isa.h"

namespace hvc {

void dense_offer(const DenseOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, Dtype out_dtype,
                 int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    visit(out_dtype, [&](auto out_type) {
      using T = typename decltype(type)::type;
      using Out = typename decltype(out_type)::type;
      const auto range = HVC_CHOOSE(offer<Out, T>);
      for (int64_t i = 0; i < tensor_count; ++i) {
        const DenseOffered& t = tensors[i];
        const bool streamed = streams(t.count * int64_t(sizeof(Out)));
        const int64_t bytes = t.count * int64_t(sizeof(T) + sizeof(Work<T>) + sizeof(Out));
        nonfinite[i] = parallel_sum(launch.threads, t.count, bytes, [&](int64_t first, int64_t last) {
          return range(static_cast<const T*>(t.grad), t.residual, t.residual && kept_dtype == kBFloat16,
                       static_cast<Out*>(t.out), streamed, first, last);
        });
      }
    });
  });
}

void dense_add(void* into, const void* other, Dtype dtype, int64_t count, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(add<T>);
    parallel_for(launch.threads, count, 3 * count * int64_t(sizeof(T)), [&](int64_t first, int64_t last) {
      range(static_cast<T*>(into), static_cast<const T*>(other), first, last);
    });
  });
}

void dense_decode(const DenseDecoded* tensors, int64_t tensor_count, Dtype payload_dtype, Dtype grad_dtype,
                  Dtype kept_dtype, double scale, Launch launch) {
  visit(payload_dtype, [&](auto type) {
    visit(grad_dtype, [&](auto grad_type) {
      using T = typename decltype(type)::type;
      using Out = typename decltype(grad_type)::type;
      const int64_t wide = kept_dtype == kBFloat16 ? sizeof(BFloat16) : sizeof(Work<Out>);
      const auto range = HVC_CHOOSE(scaled<Out, T>);
      for (int64_t i = 0; i < tensor_count; ++i) {
        const DenseDecoded& t = tensors[i];
        const bool streamed = streams(t.count * int64_t(sizeof(Out)));
        const int64_t bytes = t.count * int64_t(sizeof(T) + sizeof(Out)) + t.count * wide;
        parallel_for(launch.threads, t.count, bytes, [&](int64_t first, int64_t last) {
          range(static_cast<const T*>(t.payload), Wider<T, Out>(scale), static_cast<Out*>(t.grad), streamed, first,
                last);
          if (t.residual) memset(static_cast<char*>(t.residual) + first * wide, 0, size_t((last - first) * wide));
        });
      }
    });
  });
}

void absorb(void* grad, void* residual, void* momentum, double factor, Dtype dtype, int64_t count, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto range = HVC_CHOOSE(absorb<T>);
    const int64_t bytes = 2 * count * int64_t(sizeof(T) + sizeof(W) * (momentum ? 2 : 1));
    parallel_for(launch.threads, count, bytes, [&](int64_t first, int64_t last) {
      range(static_cast<T*>(grad), static_cast<W*>(residual), static_cast<W*>(momentum), W(factor), first, last);
    });
  });
}

void triad(float* a, const float* b, const float* c, float s, int64_t count, Launch launch) {
  const auto range = HVC_CHOOSE(add_scaled);
  parallel_for(launch.threads, count, 12 * count,
               [&](int64_t first, int64_t last) { range(a, b, c, s, streams(4 * count), first, last); });
}

}  // namespace hvc
