// What the kernels for sketches work on.
#pragma once
#include <cstdint>
#include <vector>

#include "rules/half.h"
#include "rules/sketch.h"
#include "kernels.h"

namespace hvc {

template <class T> struct SketchEncode {
  const T* grad;
  const Work<T>* residual;
  const Work<T>* momentum;
  Work<T> factor;
  int64_t count, offset;
  SketchMap map;
  Work<T>* table;
};

template <class W> struct SketchTable {
  const W* table;
  SketchMap map;
  const SketchSpan* spans;
  int64_t span_count, units;
};

// Spans as the kernels walk over them: without the empty ones, and with their blocks counted.
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
