// Norms of consecutive elements. Compiled once per instruction set.

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
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += power_of<kPower>(x[i + lane]);
  for (int lane = 0; i + lane < n; ++lane) lanes[lane] += power_of<kPower>(x[i + lane]);
  return combine_lanes(lanes);
}

template <Power kPower, class T>
int64_t norms(const T* x, const Units& units, double* out, int64_t first, int64_t last) {
  int64_t nonfinite = 0;
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t begin = unit_begin(units, unit), end = unit_begin(units, unit + 1);
    Bits<T> largest = 0;
    double sum = 0;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t n = std::min(kBlock, end - block);
      count_block(x + block, n, largest, nonfinite);
      if constexpr (kPower != kMaximum) sum += sum_block<kPower>(x + block, n);
    }
    out[unit] = kPower == kMaximum ? double(to_work(bit_cast<T>(largest))) : sum;
  }
  return nonfinite;
}
