// Loops over plain numbers. Compiled once per instruction set.

#include "kept_lanes.h"

template <class Out, class T> int64_t offer(const T* grad, const void* residual, bool short_kept, Out* out,
                                            bool streamed, int64_t first, int64_t last) {
  int64_t nonfinite = 0;
  each_group(out, first, last, [&](int64_t i, int count, bool whole) __attribute__((always_inline)) {
    Lanes<Work<T>> x = load(grad + i, count);
    if (short_kept)
      x = x + load_kept<Work<T>>(static_cast<const BFloat16*>(residual) + i, count);
    else if (residual)
      x = x + load(static_cast<const Work<T>*>(residual) + i, count);
    const uint32_t finite = mask_of<Test::below>(magnitude(x), overflow_bound<Out, Work<T>>);
    nonfinite += __builtin_popcount(~finite & valid_lanes(count));
    put(out + i, x, count, whole && streamed);
  });
  stream_fence();
  return nonfinite;
}

template <class T> void add(T* into, const T* other, int64_t first, int64_t last) {
  each_group(into, first, last, [&](int64_t i, int count, bool) __attribute__((always_inline)) {
    store(into + i, load(into + i, count) + load(other + i, count), count);
  });
}

template <class Out, class T>
void scaled(const T* payload, Wider<T, Out> factor, Out* out, bool streamed, int64_t first, int64_t last) {
  using W = Wider<T, Out>;
  each_group(out, first, last, [&](int64_t i, int count, bool whole) __attribute__((always_inline)) {
    put(out + i, widen<W>(load(payload + i, count)) * broadcast(factor), count, whole && streamed);
  });
  stream_fence();
}

template <class T>
void absorb(T* grad, Work<T>* residual, Work<T>* momentum, Work<T> factor, int64_t first, int64_t last) {
  each_group(grad, first, last, [&](int64_t i, int count, bool) __attribute__((always_inline)) {
    Lanes<Work<T>> more = load(grad + i, count);
    if (momentum) {
      more = bounded(with_momentum(broadcast(factor), load(momentum + i, count), more));
      store(momentum + i, more, count);
    }
    store(residual + i, bounded(load(residual + i, count) + more), count);
    memset(static_cast<void*>(grad + i), 0, size_t(count) * sizeof(T));
  });
}

void add_scaled(float* a, const float* b, const float* c, float s, bool streamed, int64_t first, int64_t last) {
  each_group(a, first, last, [&](int64_t i, int count, bool whole) __attribute__((always_inline)) {
    const Lanes<float> product = broadcast(s) * load(c + i, count);
    put(a + i, load(b + i, count) + product, count, whole && streamed);
  });
  stream_fence();
}
