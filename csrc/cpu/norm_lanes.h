// Norms of up to 1024 elements. Included by a body, inside its namespace, after lanes.h.

template <class T> HVC_INLINE void count_block(const T* x, int64_t n, Bits<T>& largest, int64_t& nonfinite) {
  Bits<T> most = 0, bad = 0;  // a block has too few elements to overflow even 16 bits
  for (int64_t i = 0; i < n; ++i) {
    const Bits<T> bits = magnitude_bits(x[i]);
    const bool infinite = bits >= kInfinityBits<T>;
    bad = Bits<T>(bad + infinite);
    const Bits<T> kept = infinite ? Bits<T>(0) : bits;
    most = most > kept ? most : kept;
  }
  largest = largest > most ? largest : most;
  nonfinite += bad;
}

// Returns the sum of a power, and in the same pass counts what is not finite, and raises the largest |x| of each lane
// where that is wanted. Counted before it is summed, a block would be in the cache by then, and the next one still far.
template <Power kPower, bool kLargest, class T>
HVC_INLINE double sum_block(const T* x, int64_t n, Lanes<Work<T>>& largest, int64_t& nonfinite) {
  using W = Work<T>;
  Lanes<double> sums = broadcast(0.0);
  const auto add = [&](int64_t i, int count) __attribute__((always_inline)) {
    Lanes<W> size = magnitude(load(x + i, count));
    const Mask<W> finite = mask_of<Test::below>(size, infinity<W>);
    nonfinite += kLanes - __builtin_popcount(finite);
    size = select(finite, size, broadcast(W(0)));
    if constexpr (kLargest) largest = larger(largest, size);
    sums = sums + raised<kPower>(widen<double>(size));
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(i, kLanes);
  if (i < n) add(i, rest_of(n - i));
  return combine(sums);
}

template <class W> HVC_INLINE W largest_of(const Lanes<W>& a) {
  W lanes[kLanes];
  memcpy(lanes, a.part, sizeof lanes);
  return *std::max_element(lanes, lanes + kLanes);
}
