// The rule of rules/adam.h, 32 elements at a time. Compiled once per instruction set.

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
