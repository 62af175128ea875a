// The rule of hvc/adam.h, 32 elements at a time. Compiled once per instruction set.

template <class W> HVC_INLINE Lanes<W> larger(Lanes<W> a, const Lanes<W>& b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] = b.part[i] > a.part[i] ? b.part[i] : a.part[i];
  return a;
}

template <class T> void adam_hold(T* second, const T* first, const T* grad, const Work<T>* square, Work<T> floor,
                                  const AdamScales<Work<T>>& s, bool streamed, int64_t begin, int64_t end) {
  using L = Lanes<Work<T>>;
  const L share = broadcast(s.share), least = broadcast(s.least), zero = broadcast(Work<T>(0));
  const L wanted = broadcast(s.wanted), coming = broadcast(s.coming), floors = broadcast(floor);
  const L taken = broadcast(s.taken), tiny = broadcast(kTiny<Work<T>>);
  each_group(second, begin, end, [&](int64_t i, int count, bool whole) {
    const L g = load(grad + i, count), m = load(first + i, count);
    const L change = share * (g - m), bound = least * (m + change);
    const L d = larger(larger(load(square + i, count), floors), bound * bound);
    const L all = wanted * d, more = coming * (g * g);
    const L left = all - more, off = taken * more;
    const L below = tiny - off, lowest = select(mask_of<Test::below>(below), below, zero);
    put(second + i, larger(lowest, left), count, whole && streamed);
  });
  stream_fence();
}
