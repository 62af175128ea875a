// Spans as the kernels walk over them: without the empty ones, and with their blocks counted.
#pragma once
#include <cstdint>
#include <vector>

#include "rules/sketch.h"
#include "kernels.h"

namespace hvc {

struct SketchSpans {
  SketchSpans(const Span* spans, int64_t count) {
    for (const Span* span = spans; span != spans + count; ++span) {
      if (span->count == 0) continue;
      list.push_back({span->start, span->count, units});
      units += span_blocks(list.back());
      elements += list.back().count;
    }
  }
  int64_t size() const { return int64_t(list.size()); }

  std::vector<SketchSpan> list;
  int64_t units = 0, elements = 0;
};

}  // namespace hvc
