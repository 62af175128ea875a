// What the kernels of rules/select.h choose from.
#pragma once
#include "rules/half.h"

namespace hvc {
namespace {

template <class T> struct Input {
  const T* grad;
  const Work<T>* residual;
  int64_t count, k;
};

template <class T> Input<T> input(const void* grad, const void* residual, int64_t count, int64_t k) {
  return {static_cast<const T*>(grad), static_cast<const Work<T>*>(residual), count, k};
}

}  // namespace
}  // namespace hvc
