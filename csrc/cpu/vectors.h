// One vector of HVC_WIDTH bytes. Included once per instruction set by lanes.h.
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
typedef uint32_t Singles __attribute__((vector_size(HVC_WIDTH)));  // the bits of floats
constexpr int kFloatsPerVector = kWidth / 4;

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

HVC_INLINE Native<float>::Vector root(Native<float>::Vector v) {
#if HVC_WIDTH == 64
  return (Native<float>::Vector)_mm512_maskz_sqrt_ps(__mmask16(-1), (__m512)v);
#elif HVC_WIDTH == 32
  return (Native<float>::Vector)_mm256_sqrt_ps((__m256)v);
#elif defined(__SSE2__)
  return (Native<float>::Vector)_mm_sqrt_ps((__m128)v);
#else
  for (int i = 0; i < kFloatsPerVector; ++i) v[i] = sqrtf(v[i]);
  return v;
#endif
}
HVC_INLINE Native<double>::Vector root(Native<double>::Vector v) {
#if HVC_WIDTH == 64
  return (Native<double>::Vector)_mm512_maskz_sqrt_pd(__mmask8(-1), (__m512d)v);
#elif HVC_WIDTH == 32
  return (Native<double>::Vector)_mm256_sqrt_pd((__m256d)v);
#elif defined(__SSE2__)
  return (Native<double>::Vector)_mm_sqrt_pd((__m128d)v);
#else
  for (int i = 0; i < kWidth / 8; ++i) v[i] = sqrt(v[i]);
  return v;
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

// Which elements of a vector pass a test, in the form that comparisons give and blends take: with AVX-512 a bit for
// each, else all bits of the element or none. To make bits of that and lanes of bits again takes long, so it is done
// only where bits are packed.
#if HVC_WIDTH == 64
template <class W> using Passed = uint32_t;

template <Test test> constexpr int kPredicate = test == Test::below     ? _CMP_LT_OQ
                                                : test == Test::equal   ? _CMP_EQ_OQ
                                                : test == Test::greater ? _CMP_GT_OQ
                                                                        : _CMP_GE_OQ;
template <Test test> HVC_INLINE uint32_t passing(Native<float>::Vector v, Native<float>::Vector bound) {
  return _mm512_cmp_ps_mask((__m512)v, (__m512)bound, kPredicate<test>);
}
template <Test test> HVC_INLINE uint32_t passing(Native<double>::Vector v, Native<double>::Vector bound) {
  return _mm512_cmp_pd_mask((__m512d)v, (__m512d)bound, kPredicate<test>);
}

HVC_INLINE uint32_t bits_of(uint32_t passed) { return passed; }

// Those whose bit is 1, from bit `first` on.
template <class W> HVC_INLINE uint32_t passed_of(uint32_t bits, int first) { return bits >> first; }

HVC_INLINE Native<float>::Vector blend(uint32_t passed, Native<float>::Vector yes, Native<float>::Vector no) {
  return (Native<float>::Vector)_mm512_mask_blend_ps(__mmask16(passed), (__m512)no, (__m512)yes);
}
HVC_INLINE Native<double>::Vector blend(uint32_t passed, Native<double>::Vector yes, Native<double>::Vector no) {
  return (Native<double>::Vector)_mm512_mask_blend_pd(__mmask8(passed), (__m512d)no, (__m512d)yes);
}
#else
template <class W> using Passed = typename Native<W>::Ints;

template <Test test, class V> HVC_INLINE auto passing(V v, V bound) { return compare<test>(v, bound); }

HVC_INLINE uint32_t bits_of(Native<float>::Ints passed) {
#if HVC_WIDTH == 32
  return uint32_t(_mm256_movemask_ps((__m256)passed));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps((__m128)passed));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kFloatsPerVector; ++i) bits |= uint32_t(passed[i] & 1) << i;
  return bits;
#endif
}
HVC_INLINE uint32_t bits_of(Native<double>::Ints passed) {
#if HVC_WIDTH == 32
  return uint32_t(_mm256_movemask_pd((__m256d)passed));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_pd((__m128d)passed));
#else
  return uint32_t(passed[0] & 1) | uint32_t(passed[1] & 1) << 1;
#endif
}

template <class W> HVC_INLINE Passed<W> passed_of(uint32_t bits, int first) {
  using Ints = typename Native<W>::Ints;
  Ints bit;
  for (int i = 0; i < int(kWidth / sizeof(W)); ++i) bit[i] = int32_t(1u << (first + i));
  return ((Ints{} + int32_t(bits)) & bit) == bit;
}

template <class V, class Ints> HVC_INLINE V blend(Ints passed, V yes, V no) { return passed ? yes : no; }
#endif

// ---- elements of 16 bits: two vectors of floats are one of them -------------------------------------------

HVC_INLINE Singles load_16_bits(const void* from) {
#if HVC_WIDTH == 64
  return (Singles)_mm512_maskz_cvtepu16_epi32(__mmask16(-1), load_vector<__m256i>(from));
#elif HVC_WIDTH == 32
  return (Singles)_mm256_cvtepu16_epi32(load_vector<__m128i>(from));
#else
  typedef uint16_t Shorts __attribute__((vector_size(HVC_WIDTH / 2)));
  return __builtin_convertvector(load_vector<Shorts>(from), Singles);
#endif
}

// The elements of `a`, then those of `b`; they have 16 bits.
HVC_INLINE Words join_16_bits(Singles a, Singles b) {
#if HVC_WIDTH == 64
  const __m512i low = _mm512_castsi256_si512(_mm512_maskz_cvtepi32_epi16(__mmask16(-1), (__m512i)a));
  return (Words)_mm512_maskz_inserti64x4(__mmask8(-1), low, _mm512_maskz_cvtepi32_epi16(__mmask16(-1), (__m512i)b), 1);
#elif HVC_WIDTH == 32
  return (Words)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8);
#elif defined(__SSE2__)
  const auto extended = [](Singles v) { return (__m128i)((Native<float>::Ints)(v << 16) >> 16); };
  return (Words)_mm_packs_epi32(extended(a), extended(b));
#else
  uint16_t both[2 * kFloatsPerVector];
  for (int i = 0; i < kFloatsPerVector; ++i) both[i] = uint16_t(a[i]), both[kFloatsPerVector + i] = uint16_t(b[i]);
  return load_vector<Words>(both);
#endif
}

HVC_INLINE Native<float>::Vector load_floats(const BFloat16* from) {
  return (Native<float>::Vector)(load_16_bits(from) << 16);
}
HVC_INLINE Native<float>::Vector load_floats(const Half* from) {
#if HVC_WIDTH == 64
  return (Native<float>::Vector)_mm512_maskz_cvtph_ps(__mmask16(-1), load_vector<__m256i>(from));
#elif HVC_WIDTH == 32
  return (Native<float>::Vector)_mm256_cvtph_ps(load_vector<__m128i>(from));
#else
  return (Native<float>::Vector)float_of_half<Native<float>::Vector>(load_16_bits(from));
#endif
}

HVC_INLINE Words narrowed(BFloat16, Native<float>::Vector a, Native<float>::Vector b) {
  return join_16_bits(bfloat16_of_float<Native<float>::Vector>((Singles)a),
                      bfloat16_of_float<Native<float>::Vector>((Singles)b));
}
HVC_INLINE Words narrowed(Half, Native<float>::Vector a, Native<float>::Vector b) {
  constexpr int kNearest [[maybe_unused]] = 8;  // to nearest even, without a trap
#if HVC_WIDTH == 64
  const __m512i low = _mm512_castsi256_si512(_mm512_maskz_cvtps_ph(__mmask16(-1), (__m512)a, kNearest));
  return (Words)_mm512_maskz_inserti64x4(__mmask8(-1), low, _mm512_maskz_cvtps_ph(__mmask16(-1), (__m512)b, kNearest),
                                         1);
#elif HVC_WIDTH == 32
  return (Words)_mm256_set_m128i(_mm256_cvtps_ph((__m256)b, kNearest), _mm256_cvtps_ph((__m256)a, kNearest));
#else
  return join_16_bits(half_of_float<Native<float>::Vector>((Singles)a),
                      half_of_float<Native<float>::Vector>((Singles)b));
#endif
}
