// The levels that values are sent as.
#include "rules/codebook.h"

#include <algorithm>

#include "kernels.h"
#include "visit.h"

namespace hvc {
namespace {

template <class W> void fit(const W* values, int64_t count, int levels, float* out) {
  uint32_t low = count ? kLargestFloat : 0, high = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = float_magnitude(values[i]);
    low = std::min(low, magnitude), high = std::max(high, magnitude);
  }
  const int shift = cell_shift(low, high);
  uint64_t sums[kCells] = {};
  uint32_t numbers[kCells] = {};
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = float_magnitude(values[i]), cell = (magnitude - low) >> shift;
    sums[cell] += magnitude;
    ++numbers[cell];
  }
  double sums_before[kCells + 1] = {}, numbers_before[kCells + 1] = {};
  for (int cell = 0; cell < kCells; ++cell) {
    sums_before[cell + 1] = sums_before[cell] + cell_mean(sums[cell], numbers[cell]) * double(numbers[cell]);
    numbers_before[cell + 1] = numbers_before[cell] + double(numbers[cell]);
  }
  int edges[kMostLevels + 1];
  fit_levels({sums_before, numbers_before}, low, shift, levels, edges, out);
}

}  // namespace

void codebook_fit(const void* values, Dtype dtype, int64_t count, int bits, float* levels, Launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    fit(static_cast<const W*>(values), count, codebook_levels(bits), levels);
  });
}

}  // namespace hvc
