// What the kernels for records work on. `Parts` is where a kernel finds the ranks' records.
#pragma once
#include "rules/record.h"

namespace hvc {
namespace {

template <class T> struct RecordOffer {
  const T* grad;
  const Work<T>* residual;
  int64_t count, block;
  ScaleRule rule;
  uint8_t* records;
};

template <class W, class Parts> struct RecordFold {
  Parts parts;
  int64_t ranks, count, block;
  ScaleRule rule;
  const W* kept;
  W* left;
  uint8_t* out;  // may be one of the parts
};

template <class T> struct RecordDecode {
  const uint8_t* records;
  const float* scales;  // this rank's own
  int64_t count, block;
  double scale;
  T* grad;
  Work<T>* residual;
};

}  // namespace
}  // namespace hvc
