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

template <Power kPower, class T> HVC_INLINE double sum_block(const T* x, int64_t n) {
  Lanes<double> sums = broadcast(0.0);
  const auto add = [&](int64_t i, int count) __attribute__((always_inline)) {
    sums = sums + power_of<kPower>(widen<double>(load(x + i, count)));
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(i, kLanes);
  if (i < n) add(i, rest_of(n - i));
  return combine(sums);
}
