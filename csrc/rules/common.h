// Words shared by every rule: one text for g++ and nvcc.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define HVC_RULE __host__ __device__ __forceinline__
#else
#define HVC_RULE inline __attribute__((always_inline))
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "what is sent is little-endian, and so are the numbers of every processor that this is written for"
#endif

namespace hvc {

// Element types, numbered as the Python side numbers them.
enum Dtype : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Arithmetic on T happens in Work<T>: float64 for float64, float32 for everything else.
template <class T> struct WorkOf {
  using type = float;
};
template <> struct WorkOf<double> {
  using type = double;
};
template <class T> using Work = typename WorkOf<T>::type;

constexpr int64_t kWordBits = 64;

HVC_RULE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
HVC_RULE int64_t words_for(int64_t count) { return ceil_div(count, kWordBits); }

template <class To, class From> HVC_RULE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace hvc
