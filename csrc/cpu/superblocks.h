// Units of rows shared among threads, and the last level of the tree of rules/tree.h: sums of rows from those of their
// superblocks.
#pragma once
#include <vector>

#include "rules/tree.h"
#include "parallel.h"

namespace hvc {

// Superblocks of all rows, in order: the unit in which work is shared out.
struct Units {
  int64_t count, row_length, per_row, total;
};

inline Units units_of(int64_t count, int64_t row_length) {
  const int64_t per_row = ceil_div(row_length, kSuperblock);
  const int64_t rows = count / row_length, rest = count % row_length;
  return {count, row_length, per_row, rows * per_row + ceil_div(rest, kSuperblock)};
}

inline int64_t unit_begin(const Units& u, int64_t unit) {
  if (unit >= u.total) return u.count;
  return unit / u.per_row * u.row_length + unit % u.per_row * kSuperblock;
}

// What an offer finds in a range of units.
struct OfferResult {
  uint64_t head;  // bits of a first word that begins in the range before
  int64_t nonfinite;
};

// Runs range(first, last) on units and joins the words that two ranges share; returns how many values are not finite.
template <class Range>
int64_t offer_units(const Units& units, uint64_t* bits, int64_t bytes, int threads, const Range& range) {
  std::vector<OfferResult> results(size_t(std::max(threads, 1)));
  std::vector<int64_t> begins(results.size());
  parallel_ranges(threads, units.total, bytes, [&](int64_t index, int64_t first, int64_t last) {
    begins[size_t(index)] = unit_begin(units, first);
    results[size_t(index)] = range(first, last);
  });
  int64_t nonfinite = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].head) bits[begins[i] / kWordBits] |= results[i].head;
    nonfinite += results[i].nonfinite;
  }
  return nonfinite;
}

// The first superblock of a row is copied: `unit_sums` may be `sums` where rows have one each.
inline void add_superblocks(const Units& units, const double* unit_sums, double* sums) {
  for (int64_t unit = 0; unit < units.total; ++unit) {
    double& sum = sums[unit / units.per_row];
    sum = canonical(unit % units.per_row == 0 ? unit_sums[unit] : sum + unit_sums[unit]);
  }
}

}  // namespace hvc
