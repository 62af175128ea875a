// 32 elements at a time, in vectors of HVC_WIDTH bytes. Included once per instruction set by foreach_isa.h.
// Compiler vectors carry the arithmetic; intrinsics appear only where C++ has no word: masks and half floats.

constexpr int kWidth = HVC_WIDTH;

template <class W> struct Native;
template <> struct Native<float> {
  using Int = int32_t;
  typedef float Vector __attribute__((vector_size(HVC_WIDTH)));
  typedef int32_t Ints __attribute__((vector_size(HVC_WIDTH)));
};
template <> struct Native<double> {
  using Int = int64_t;
  typedef double Vector __attribute__((vector_size(HVC_WIDTH)));
  typedef int64_t Ints __attribute__((vector_size(HVC_WIDTH)));
};
typedef uint64_t Words __attribute__((vector_size(HVC_WIDTH)));
constexpr int kWordsPerVector = kWidth / 8;

// ---- one vector -------------------------------------------------------------------------------------------

template <class V, class P> HVC_INLINE V load_vector(const P* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V, class P> HVC_INLINE void store_vector(P* into, V v) { memcpy(into, &v, sizeof v); }

// Around the cache: for large outputs that are written and not read. `into` is aligned to the vector.
template <class P> HVC_INLINE void stream_vector(P* into, Words v) {
#if HVC_WIDTH == 64
  _mm512_stream_si512(reinterpret_cast<__m512i*>(into), (__m512i)v);
#elif HVC_WIDTH == 32
  _mm256_stream_si256(reinterpret_cast<__m256i*>(into), (__m256i)v);
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(into), (__m128i)v);
#else
  store_vector(into, v);
#endif
}

// Orders streamed stores before whatever tells another thread that they are done.
HVC_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

enum class Test { below, equal, greater, greater_equal };

template <Test test, class V> HVC_INLINE auto compare(V v, V bound) {
  if constexpr (test == Test::below)
    return v < bound;
  else if constexpr (test == Test::equal)
    return v == bound;
  else if constexpr (test == Test::greater)
    return v > bound;
  else
    return v >= bound;
}

#if HVC_WIDTH == 64
template <Test test> constexpr int kPredicate = test == Test::below     ? _CMP_LT_OQ
                                                : test == Test::equal   ? _CMP_EQ_OQ
                                                : test == Test::greater ? _CMP_GT_OQ
                                                                        : _CMP_GE_OQ;
template <Test test> HVC_INLINE uint32_t vector_mask(Native<float>::Vector v, Native<float>::Vector bound) {
  return _mm512_cmp_ps_mask((__m512)v, (__m512)bound, kPredicate<test>);
}
template <Test test> HVC_INLINE uint32_t vector_mask(Native<double>::Vector v, Native<double>::Vector bound) {
  return _mm512_cmp_pd_mask((__m512d)v, (__m512d)bound, kPredicate<test>);
}
#else
HVC_INLINE uint32_t top_bits(Native<float>::Ints v) {
#if HVC_WIDTH == 32
  return uint32_t(_mm256_movemask_ps((__m256)v));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps((__m128)v));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kWidth / 4; ++i) mask |= uint32_t(v[i] & 1) << i;
  return mask;
#endif
}
HVC_INLINE uint32_t top_bits(Native<double>::Ints v) {
#if HVC_WIDTH == 32
  return uint32_t(_mm256_movemask_pd((__m256d)v));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_pd((__m128d)v));
#else
  return uint32_t(v[0] & 1) | uint32_t(v[1] & 1) << 1;
#endif
}
template <Test test> HVC_INLINE uint32_t vector_mask(Native<float>::Vector v, Native<float>::Vector bound) {
  return top_bits((Native<float>::Ints)compare<test>(v, bound));
}
template <Test test> HVC_INLINE uint32_t vector_mask(Native<double>::Vector v, Native<double>::Vector bound) {
  return top_bits((Native<double>::Ints)compare<test>(v, bound));
}
#endif

// Lane i is `yes` where bit i of the mask is 1, else `no`.
template <class W> HVC_INLINE typename Native<W>::Vector vector_select(uint32_t mask, typename Native<W>::Vector yes,
                                                                       typename Native<W>::Vector no) {
#if HVC_WIDTH == 64
  if constexpr (sizeof(W) == 4)
    return (typename Native<W>::Vector)_mm512_mask_blend_ps(__mmask16(mask), (__m512)no, (__m512)yes);
  else
    return (typename Native<W>::Vector)_mm512_mask_blend_pd(__mmask8(mask), (__m512d)no, (__m512d)yes);
#else
  using Ints = typename Native<W>::Ints;
  Ints bit;
  for (int i = 0; i < int(kWidth / sizeof(W)); ++i) bit[i] = 1 << i;
  const Ints chosen = ((Ints{} + int32_t(mask)) & bit) == bit;
  return (typename Native<W>::Vector)(((Ints)yes & chosen) | ((Ints)no & ~chosen));
#endif
}

HVC_INLINE Native<float>::Vector root(Native<float>::Vector v) {
#if HVC_WIDTH == 64
  return (Native<float>::Vector)_mm512_sqrt_ps((__m512)v);
#elif HVC_WIDTH == 32
  return (Native<float>::Vector)_mm256_sqrt_ps((__m256)v);
#elif defined(__SSE2__)
  return (Native<float>::Vector)_mm_sqrt_ps((__m128)v);
#else
  for (int i = 0; i < kWidth / 4; ++i) v[i] = sqrtf(v[i]);
  return v;
#endif
}
HVC_INLINE Native<double>::Vector root(Native<double>::Vector v) {
#if HVC_WIDTH == 64
  return (Native<double>::Vector)_mm512_sqrt_pd((__m512d)v);
#elif HVC_WIDTH == 32
  return (Native<double>::Vector)_mm256_sqrt_pd((__m256d)v);
#elif defined(__SSE2__)
  return (Native<double>::Vector)_mm_sqrt_pd((__m128d)v);
#else
  for (int i = 0; i < kWidth / 8; ++i) v[i] = sqrt(v[i]);
  return v;
#endif
}

// ---- 32 lanes ---------------------------------------------------------------------------------------------

template <class W> struct Lanes {
  using Vector = typename Native<W>::Vector;
  static constexpr int kPerPart = kWidth / sizeof(W);
  static constexpr int kParts = kLanes / kPerPart;
  Vector part[kParts];
};

template <class W> HVC_INLINE Lanes<W> broadcast(W value) {
  Lanes<W> a;
  for (auto& part : a.part) part = value - typename Lanes<W>::Vector{};  // + would lose the sign of -0
  return a;
}

template <class W> HVC_INLINE Lanes<W> operator+(Lanes<W> a, const Lanes<W>& b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] += b.part[i];
  return a;
}
template <class W> HVC_INLINE Lanes<W> operator-(Lanes<W> a, const Lanes<W>& b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] -= b.part[i];
  return a;
}
template <class W> HVC_INLINE Lanes<W> operator*(Lanes<W> a, const Lanes<W>& b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] *= b.part[i];
  return a;
}
template <class W> HVC_INLINE Lanes<W> operator/(Lanes<W> a, const Lanes<W>& b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] /= b.part[i];
  return a;
}
template <class W> HVC_INLINE Lanes<W> operator-(Lanes<W> a) {
  for (auto& part : a.part) part = -part;
  return a;
}
template <class W> HVC_INLINE Lanes<W> magnitude(Lanes<W> a) {
  using Ints = typename Native<W>::Ints;
  const Ints all_but_sign = Ints{} + std::numeric_limits<typename Native<W>::Int>::max();
  for (auto& part : a.part) part = (typename Lanes<W>::Vector)((Ints)part & all_but_sign);
  return a;
}

// Bit i says whether lane i passes the test against the bound; NaN passes none.
template <Test test, class W> HVC_INLINE uint32_t mask_of(const Lanes<W>& a, W bound = 0) {
  const typename Lanes<W>::Vector bounds = bound - typename Lanes<W>::Vector{};
  uint32_t mask = 0;
  for (int i = 0; i < a.kParts; ++i) mask |= vector_mask<test>(a.part[i], bounds) << (i * a.kPerPart);
  return mask;
}

template <class W> HVC_INLINE Lanes<W> select(uint32_t mask, const Lanes<W>& yes, const Lanes<W>& no) {
  Lanes<W> a;
  for (int i = 0; i < a.kParts; ++i) a.part[i] = vector_select<W>(mask >> (i * a.kPerPart), yes.part[i], no.part[i]);
  return a;
}

// ---- what rules/lanewise.h needs of lanes -----------------------------------------------------------------

using hvc::at_least;
using hvc::below;
using hvc::choose;
using hvc::constant;
using hvc::larger;
using hvc::limited;
using hvc::magnitude;
using hvc::number_in;
using hvc::root;

#include "rules/lanewise.h"

template <class W> W number_in(const Lanes<W>&);

template <class W> HVC_INLINE uint32_t at_least(const Lanes<W>& a, Same<W> bound) {
  return mask_of<Test::greater_equal>(a, bound);
}
template <class W> HVC_INLINE uint32_t below(const Lanes<W>& a, Same<W> bound) {
  return mask_of<Test::below>(a, bound);
}
template <class W> HVC_INLINE Lanes<W> choose(uint32_t mask, const Lanes<W>& yes, const Lanes<W>& no) {
  return select(mask, yes, no);
}
template <class W> HVC_INLINE Lanes<W> constant(const Lanes<W>&, Same<W> value) { return broadcast(value); }
template <class W> HVC_INLINE Lanes<W> larger(Lanes<W> a, const Lanes<W>& b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] = larger_part(a.part[i], b.part[i]);
  return a;
}
template <class W> HVC_INLINE Lanes<W> limited(Lanes<W> a, Same<W> most) {
  const typename Lanes<W>::Vector bound = most - typename Lanes<W>::Vector{};
  for (auto& part : a.part) part = limited_part(part, bound);
  return a;
}

// ---- sums -------------------------------------------------------------------------------------------------

// The tree of rules/tree.h below one block.
template <class W> HVC_INLINE W combine(const Lanes<W>& a) {
  W lanes[kLanes];
  memcpy(lanes, a.part, sizeof lanes);
  return combine_lanes(lanes);
}

// ---- memory -----------------------------------------------------------------------------------------------

template <class W> HVC_INLINE Lanes<W> load_native(const W* from) {
  Lanes<W> a;
  for (int i = 0; i < a.kParts; ++i) a.part[i] = load_vector<typename Lanes<W>::Vector>(from + i * a.kPerPart);
  return a;
}
template <class W> HVC_INLINE void store_native(W* into, const Lanes<W>& a) {
  for (int i = 0; i < a.kParts; ++i) store_vector(into + i * a.kPerPart, a.part[i]);
}

HVC_INLINE Lanes<float> load(const float* from) { return load_native(from); }
HVC_INLINE Lanes<double> load(const double* from) { return load_native(from); }
HVC_INLINE Lanes<float> load(const BFloat16* from) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = to_float(from[i]);
  return load_native(wide);
}
HVC_INLINE Lanes<float> load(const Half* from) {
#if HVC_WIDTH == 64
  Lanes<float> a;
  for (int i = 0; i < 2; ++i)
    a.part[i] = (Native<float>::Vector)_mm512_maskz_cvtph_ps(__mmask16(-1), load_vector<__m256i>(from + 16 * i));
  return a;
#elif HVC_WIDTH == 32
  Lanes<float> a;
  for (int i = 0; i < 4; ++i) a.part[i] = (Native<float>::Vector)_mm256_cvtph_ps(load_vector<__m128i>(from + 8 * i));
  return a;
#else
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = to_float(from[i]);
  return load_native(wide);
#endif
}

HVC_INLINE void store(float* into, const Lanes<float>& a) { store_native(into, a); }
HVC_INLINE void store(double* into, const Lanes<double>& a) { store_native(into, a); }
// Other pairs of types go through the per-element rule.
template <class T, class W> HVC_INLINE void store(T* into, const Lanes<W>& a) {
  W wide[kLanes];
  memcpy(wide, a.part, sizeof wide);
  for (int i = 0; i < kLanes; ++i) into[i] = from_work<T>(wide[i]);
}
#if HVC_WIDTH > 16
HVC_INLINE void store(Half* into, const Lanes<float>& a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#if HVC_WIDTH == 64
  for (int i = 0; i < 2; ++i)
    store_vector(into + 16 * i, _mm512_maskz_cvtps_ph(__mmask16(-1), (__m512)a.part[i], kNearest));
#else
  for (int i = 0; i < 4; ++i) store_vector(into + 8 * i, _mm256_cvtps_ph((__m256)a.part[i], kNearest));
#endif
}
#endif

// Lanes of float as lanes of double; the identity for the same type.
template <class To, class W> HVC_INLINE Lanes<To> widen(const Lanes<W>& a) {
  W from[kLanes];
  To to[kLanes];
  memcpy(from, a.part, sizeof from);
  for (int i = 0; i < kLanes; ++i) to[i] = To(from[i]);
  return load_native(to);
}

// Around the cache; `into` is aligned to 64 bytes. In this way 32 lanes are whole cache lines for every type.
template <class T, class W> HVC_INLINE void stream(T* into, const Lanes<W>& a) {
  alignas(64) T elements[kLanes];
  store(elements, a);
  constexpr int kPerVector = kWidth / sizeof(T);
  for (int i = 0; i < kLanes; i += kPerVector) stream_vector(into + i, load_vector<Words>(elements + i));
}

// What is left behind the last whole 32 lanes. The compiler learns that it is less, and so makes no second copy of
// the loop's body for 32 lanes: that saves time in compiling, not in running.
HVC_INLINE int rest_of(int64_t count) {
  if (count <= 0 || count >= kLanes) __builtin_unreachable();
  return int(count);
}

// The mask of the first `count` of 32 lanes.
HVC_INLINE uint32_t valid_lanes(int count) { return count == kLanes ? ~0u : (1u << count) - 1; }

// The first `count` of 32 lanes; absent lanes read as 0 and are not written.
template <class T> HVC_INLINE Lanes<Work<T>> load(const T* from, int count) {
  if (__builtin_expect(count == kLanes, 1)) return load(from);
  T padded[kLanes] = {};
  memcpy(padded, from, size_t(count) * sizeof(T));
  return load(padded);
}
template <class T, class W> HVC_INLINE void store(T* into, const Lanes<W>& a, int count) {
  if (__builtin_expect(count == kLanes, 1)) return store(into, a);
  T padded[kLanes];
  store(padded, a);
  memcpy(into, padded, size_t(count) * sizeof(T));
}

// Elements from `into` to the next cache line, at most `count`.
template <class T> HVC_INLINE int to_cache_line(const T* into, int64_t count) {
  const auto past = reinterpret_cast<uintptr_t>(into) % 64;
  return int(std::min<int64_t>(count, int64_t((64 - past) % 64 / sizeof(T))));
}

// Calls group(begin, count, whole) for [first, last): at most 31 elements that bring `out` to a cache line, then
// whole groups of 32, then the rest.
template <class T, class Group>
HVC_INLINE void each_group(const T* out, int64_t first, int64_t last, const Group& group) {
  int64_t i = first;
  if (const int lead = to_cache_line(out + first, last - first)) {
    group(i, lead, false);
    i += lead;
  }
  for (; i + kLanes <= last; i += kLanes) group(i, kLanes, true);
  if (i < last) group(i, int(last - i), false);
}

template <class T, class W> HVC_INLINE void put(T* into, const Lanes<W>& a, int count, bool around_cache) {
  if (around_cache)
    stream(into, a);
  else
    store(into, a, count);
}
