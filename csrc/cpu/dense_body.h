// Loops over plain numbers. Compiled once per instruction set.

// Calls group(begin, count, whole) for [first, last): at most 31 elements that bring `out` to a cache line, then
// whole groups of 32, then the rest.
template <class T, class Group>
HVC_INLINE void each_group(const T* out, int64_t first, int64_t last, const Group& group) {
  int64_t i = first;
  if (const int lead = to_cache_line(out + first, last - first)) {
    group(i, lead, false);
    i += lead;
  }
  for (; i + kLanes <= last; i += kLanes) group(i, kLanes, true);
  if (i < last) group(i, int(last - i), false);
}

template <class T, class W> HVC_INLINE void put(T* into, const Lanes<W>& a, int count, bool around_cache) {
  if (around_cache)
    stream(into, a);
  else
    store(into, a, count);
}

template <class Out, class T>
int64_t offer(const T* grad, const Work<T>* residual, Out* out, bool streamed, int64_t first, int64_t last) {
  int64_t nonfinite = 0;
  each_group(out, first, last, [&](int64_t i, int count, bool whole) {
    Lanes<Work<T>> x = load(grad + i, count);
    if (residual) x = x + load(residual + i, count);
    const uint32_t finite = mask_of<Test::below>(magnitude(x), overflow_bound<Out, Work<T>>);
    nonfinite += __builtin_popcount(~finite & valid_lanes(count));
    put(out + i, x, count, whole && streamed);
  });
  stream_fence();
  return nonfinite;
}

template <class T> void add(T* into, const T* other, int64_t first, int64_t last) {
  each_group(into, first, last, [&](int64_t i, int count, bool) {
    store(into + i, load(into + i, count) + load(other + i, count), count);
  });
}

template <class Out, class T>
void scale(const T* payload, Wider<T, Out> factor, Out* out, bool streamed, int64_t first, int64_t last) {
  using W = Wider<T, Out>;
  each_group(out, first, last, [&](int64_t i, int count, bool whole) {
    put(out + i, widen<W>(load(payload + i, count)) * broadcast(factor), count, whole && streamed);
  });
  stream_fence();
}

template <class T>
void absorb(T* grad, Work<T>* residual, Work<T>* momentum, Work<T> factor, int64_t first, int64_t last) {
  each_group(grad, first, last, [&](int64_t i, int count, bool) {
    Lanes<Work<T>> more = load(grad + i, count);
    if (momentum) {
      more = within(broadcast(factor) * load(momentum + i, count) + more, most_kept<Work<T>>);
      store(momentum + i, more, count);
    }
    store(residual + i, within(load(residual + i, count) + more, most_kept<Work<T>>), count);
    memset(static_cast<void*>(grad + i), 0, size_t(count) * sizeof(T));
  });
}

void add_scaled(float* a, const float* b, const float* c, float s, bool streamed, int64_t first, int64_t last) {
  each_group(a, first, last, [&](int64_t i, int count, bool whole) {
    const Lanes<float> product = broadcast(s) * load(c + i, count);
    put(a + i, load(b + i, count) + product, count, whole && streamed);
  });
  stream_fence();
}
