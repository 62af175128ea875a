// Spans as the kernels walk over them: without the empty ones, and with their blocks counted.
#pragma once
#include <cstdint>
#include <vector>

#include "hvc/sketch.h"

namespace hvc {

struct SketchSpans {
  // `pairs` holds (start, count).
  SketchSpans(const int64_t* pairs, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (pairs[2 * i + 1] == 0) continue;
      list.push_back({pairs[2 * i], pairs[2 * i + 1], units});
      units += span_blocks(list.back());
      elements += list.back().count;
    }
  }
  int64_t size() const { return int64_t(list.size()); }

  std::vector<SketchSpan> list;
  int64_t units = 0, elements = 0;
};

}  // namespace hvc
