// The rules for Adam's step, 32 elements at a time. Compiled once per instruction set.

template <class T> void adam_hold(T* second, const T* first, const T* grad, const Work<T>* square, Work<T> floor,
                                  const AdamScales<Work<T>>& s, bool streamed, int64_t begin, int64_t end) {
  using L = Lanes<Work<T>>;
  const AdamScales<L> scales{broadcast(s.share), broadcast(s.least), broadcast(s.wanted), broadcast(s.coming),
                             broadcast(s.taken)};
  const L floors = broadcast(floor);
  each_group(second, begin, end, [&](int64_t i, int count, bool whole) __attribute__((always_inline)) {
    const L held = adam_held(load(first + i, count), load(grad + i, count), load(square + i, count), floors, scales);
    put(second + i, held, count, whole && streamed);
  });
  stream_fence();
}

// What is written has just been read, so nothing is streamed. One vector after the other, else registers run out.
template <class T> void adam_step(T* weight, T* first, const T* grad, const Work<T>* square, Work<T> floor,
                                  const AdamStep<Work<T>>& step, int64_t begin, int64_t end) {
  using L = Lanes<Work<T>>;
  const auto s = step;
  const auto floors = floor - typename L::Vector{};
  each_group(weight, begin, end, [&](int64_t i, int count, bool) __attribute__((always_inline)) {
    L w = load(weight + i, count), m = load(first + i, count);
    const L g = load(grad + i, count), d = load(square + i, count);
    for (int k = 0; k < L::kParts; ++k) {
      const auto moved = adam_moved(w.part[k], m.part[k], g.part[k], d.part[k], floors, s);
      w.part[k] = moved.weight;
      m.part[k] = moved.first;
    }
    store(weight + i, w, count);
    store(first + i, m, count);
  });
}
