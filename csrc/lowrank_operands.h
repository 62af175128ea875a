// What the kernels for factors of low rank work on; rules/lowrank.h says what the members are.
#pragma once
#include "rules/half.h"

namespace hvc {
namespace {

template <class T> struct Matrix {
  const T* grad;
  const Work<T>* residual;
  int64_t rows, columns, rank;
};

template <class T> struct LeftOf {
  Matrix<T> x;
  const Work<T>* right;
  Work<T>* left;
};

template <class T> struct Product {
  const Work<T>*left, *right;
  int64_t rows, columns, rank;
  double scale;
  T* grad;
  Work<T>* residual;
};

template <class T>
Matrix<T> matrix(const void* grad, const void* residual, int64_t rows, int64_t columns, int64_t rank) {
  return {static_cast<const T*>(grad), static_cast<const Work<T>*>(residual), rows, columns, rank};
}

}  // namespace
}  // namespace hvc
