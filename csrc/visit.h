// From a run-time element type to a compile-time one.
#pragma once
#include "rules/half.h"

namespace hvc {

template <class T> struct Type {
  using type = T;
};

template <class Body> inline void visit(Dtype dtype, Body&& body) {
  switch (dtype) {
    case kFloat32:
      return body(Type<float>());
    case kFloat64:
      return body(Type<double>());
    case kFloat16:
      return body(Type<Half>());
    case kBFloat16:
      return body(Type<BFloat16>());
  }
}

// The arithmetic types only: Type<double> for kFloat64, Type<float> for the rest.
template <class Body> inline void visit_work(Dtype dtype, Body&& body) {
  if (dtype == kFloat64)
    body(Type<double>());
  else
    body(Type<float>());
}

}  // namespace hvc
