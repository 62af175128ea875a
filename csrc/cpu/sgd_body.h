// The rule for SGD's step, 32 elements at a time. Compiled once per instruction set.

// What is written has just been read, so nothing is streamed. One vector after the other, else registers run out.
template <bool kBuffer, class T>
void sgd_range(T* weight, T* buffer, const T* grad, const SgdStep<Work<T>>& step, int64_t begin, int64_t end) {
  using L = Lanes<Work<T>>;
  const auto s = step;
  each_group(weight, begin, end, [&](int64_t i, int count, bool) __attribute__((always_inline)) {
    L w = load(weight + i, count), b = kBuffer ? load(buffer + i, count) : L{};
    const L g = load(grad + i, count);
    for (int k = 0; k < L::kParts; ++k) {
      const auto moved = sgd_moved(w.part[k], b.part[k], g.part[k], kBuffer, s);
      w.part[k] = moved.weight;
      b.part[k] = moved.buffer;
    }
    store(weight + i, w, count);
    if (kBuffer) store(buffer + i, b, count);
  });
}

template <class T>
void sgd_step(T* weight, T* buffer, const T* grad, const SgdStep<Work<T>>& step, int64_t begin, int64_t end) {
  if (buffer)
    sgd_range<true>(weight, buffer, grad, step, begin, end);
  else
    sgd_range<false>(weight, buffer, grad, step, begin, end);
}
