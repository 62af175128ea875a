// Norms of consecutive elements. Compiled once per instruction set.

#include "norm_lanes.h"

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

// Both of each unit: the largest |x|, then the sum of squares.
template <class T> int64_t moments(const T* x, const Units& units, double* out, int64_t first, int64_t last) {
  int64_t nonfinite = 0;
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t begin = unit_begin(units, unit), end = unit_begin(units, unit + 1);
    Bits<T> largest = 0;
    double sum = 0;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t n = std::min(kBlock, end - block);
      count_block(x + block, n, largest, nonfinite);
      sum += sum_block<kPower2>(x + block, n);
    }
    out[unit] = double(to_work(bit_cast<T>(largest)));
    out[units.total + unit] = sum;
  }
  return nonfinite;
}
