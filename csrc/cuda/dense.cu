// Plain numbers: offer, add, decode. And the triad that measures the memory.
#include "hvc/dense.h"
#include "launch.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

template <class Out, class T>
__global__ void offer_kernel(const T* grad, const Work<T>* residual, int64_t count, Out* out, int64_t* nonfinite) {
  int64_t bad = 0;
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    const Work<T> x = to_work(grad[i]);
    out[i] = from_work<Out>(residual ? x + residual[i] : x);
    bad += !is_finite(out[i]);
  }
  add_count(nonfinite, bad);
}

template <class T> __global__ void add_kernel(T* into, const T* other, int64_t count) {
  for (int64_t i = first_item(); i < count; i += item_stride()) into[i] = dense_sum(into[i], other[i]);
}

template <class Out, class T> __global__ void decode_kernel(const T* payload, int64_t count, Wider<T, Out> factor,
                                                            Out* grad, Work<Out>* residual) {
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    grad[i] = dense_scaled<Out>(payload[i], factor);
    if (residual) residual[i] = 0;
  }
}

template <class T>
__global__ void absorb_kernel(T* grad, Work<T>* residual, Work<T>* momentum, Work<T> factor, int64_t count) {
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    Work<T> more = to_work(grad[i]);
    if (momentum) momentum[i] = more = bounded(with_momentum(factor, momentum[i], more));
    residual[i] = bounded(Work<T>(residual[i] + more));
    grad[i] = T{};
  }
}

__global__ void triad_kernel(float* a, const float* b, const float* c, float s, int64_t count) {
  for (int64_t i = first_item(); i < count; i += item_stride()) a[i] = b[i] + s * c[i];
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void dense_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, void* out, Dtype out_dtype,
                 int64_t* nonfinite, Launch launch) {
  clear(nonfinite, sizeof *nonfinite, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    visit(out_dtype, [&](auto out_type) {
      using Out = typename decltype(out_type)::type;
      start(offer_kernel<Out, T>, count, launch, static_cast<const T*>(grad),
            static_cast<const Work<T>*>(residual), count, static_cast<Out*>(out), nonfinite);
    });
  });
}

void dense_add(void* into, const void* other, Dtype dtype, int64_t count, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    start(add_kernel<T>, count, launch, static_cast<T*>(into), static_cast<const T*>(other), count);
  });
}

void dense_decode(const void* payload, Dtype payload_dtype, int64_t count, double factor, void* grad,
                  Dtype grad_dtype, void* residual, Launch launch) {
  visit(payload_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    visit(grad_dtype, [&](auto grad_type) {
      using Out = typename decltype(grad_type)::type;
      start(decode_kernel<Out, T>, count, launch, static_cast<const T*>(payload), count, Wider<T, Out>(factor),
            static_cast<Out*>(grad), static_cast<Work<Out>*>(residual));
    });
  });
}

void absorb(void* grad, void* residual, void* momentum, double factor, Dtype dtype, int64_t count, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    start(absorb_kernel<T>, count, launch, static_cast<T*>(grad), static_cast<W*>(residual),
          static_cast<W*>(momentum), W(factor), count);
  });
}

void triad(float* a, const float* b, const float* c, float s, int64_t count, Launch launch) {
  start(triad_kernel, count, launch, a, b, c, s, count);
}

}  // namespace hvc
