// The last level of the tree of hvc/tree.h: sums of rows from those of their superblocks.
#pragma once
#include "hvc/tree.h"

namespace hvc {

// The first superblock of a row is copied: `unit_sums` may be `sums` where rows have one each.
inline void add_superblocks(const Units& units, const double* unit_sums, double* sums) {
  for (int64_t unit = 0; unit < units.total; ++unit) {
    double& sum = sums[unit / units.per_row];
    sum = canonical(unit % units.per_row == 0 ? unit_sums[unit] : sum + unit_sums[unit]);
  }
}

// How many rows have a step that does not fit.
inline int64_t misfits(const Units& units, const double* sums) {
  int64_t found = 0;
  for (int64_t row = 0; row * units.row_length < units.count; ++row)
    found += !step_fits(sums[row], row_elements(units, row));
  return found;
}

}  // namespace hvc
