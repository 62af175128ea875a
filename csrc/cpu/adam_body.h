// The rule of hvc/adam.h, 32 elements at a time. Compiled once per instruction set.

template <class W> HVC_INLINE Lanes<W> larger(Lanes<W> a, const Lanes<W>& b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] = b.part[i] > a.part[i] ? b.part[i] : a.part[i];
  return a;
}

template <class T>
void adam_hold(T* second, const T* first, const T* grad, const Work<T>* root, const AdamScales<Work<T>>& s,
               int64_t begin, int64_t end) {
  using L = Lanes<Work<T>>;
  const L share = broadcast(s.share), least = broadcast(s.least);
  const L wanted = broadcast(s.wanted), coming = broadcast(s.coming), zero = broadcast(Work<T>(0));
  for (int64_t i = begin; i < end; i += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, end - i));
    const L g = load(grad + i, count), m = load(first + i, count);
    const L change = share * (g - m);
    const L d = larger(load(root + i, count), least * magnitude(m + change));
    const L square = wanted * (d * d), more = coming * (g * g);
    const L left = square - more;
    store(second + i, select(mask_of<Test::greater>(left), left, zero), count);
  }
}
