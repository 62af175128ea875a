// 32 elements at a time, in vectors of HVC_WIDTH bytes. Included once per instruction set by foreach_isa.h.

#include "vectors.h"

// ---- 32 lanes ---------------------------------------------------------------------------------------------

// A compiler copies a structure of this size in smaller pieces than it is then read in, and the reader waits for all of
// them: so lanes and masks are copied part by part. Their constructors are written out, for those that a compiler makes
// are not of this instruction set.
template <class V, int... i> HVC_INLINE void copy_parts(V* into, const V* from, std::integer_sequence<int, i...>) {
  ((into[i] = from[i]), ...);
}
template <class V, int kNumber> HVC_INLINE void copy_parts(V (&into)[kNumber], const V (&from)[kNumber]) {
  copy_parts(into, from, std::make_integer_sequence<int, kNumber>());
}

template <class W> struct Lanes {
  using Vector = typename Native<W>::Vector;
  static constexpr int kPerPart = kWidth / sizeof(W);
  static constexpr int kParts = kLanes / kPerPart;
  Vector part[kParts];

  Lanes() = default;
  HVC_RULE Lanes(const Lanes& other) { copy_parts(part, other.part); }
  HVC_RULE Lanes& operator=(const Lanes& other) {
    copy_parts(part, other.part);
    return *this;
  }
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

// Which of 32 lanes pass a test; as a word, bit i is lane i.
template <class W> struct Mask {
  Passed<W> part[Lanes<W>::kParts];

  Mask() = default;
  HVC_RULE Mask(const Mask& other) { copy_parts(part, other.part); }
  HVC_RULE operator uint32_t() const {
    uint32_t bits = 0;
    for (int i = 0; i < Lanes<W>::kParts; ++i) bits |= bits_of(part[i]) << (i * Lanes<W>::kPerPart);
    return bits;
  }
};

template <class W> HVC_INLINE bool any_of(const Mask<W>& mask) {
  Passed<W> any = mask.part[0];
  for (int i = 1; i < Lanes<W>::kParts; ++i) any |= mask.part[i];
  return bits_of(any) != 0;
}

// NaN passes no test.
template <Test test, class W> HVC_INLINE Mask<W> mask_of(const Lanes<W>& a, W bound = 0) {
  const typename Lanes<W>::Vector bounds = bound - typename Lanes<W>::Vector{};
  Mask<W> mask;
  for (int i = 0; i < a.kParts; ++i) mask.part[i] = passing<test>(a.part[i], bounds);
  return mask;
}

template <class W> HVC_INLINE Mask<W> mask_of_bits(uint32_t bits) {
  Mask<W> mask;
  for (int i = 0; i < Lanes<W>::kParts; ++i) mask.part[i] = passed_of<W>(bits, i * Lanes<W>::kPerPart);
  return mask;
}

template <class W> HVC_INLINE Lanes<W> select(const Mask<W>& mask, const Lanes<W>& yes, const Lanes<W>& no) {
  Lanes<W> a;
  for (int i = 0; i < a.kParts; ++i) a.part[i] = blend(mask.part[i], yes.part[i], no.part[i]);
  return a;
}
template <class W> HVC_INLINE Lanes<W> select(uint32_t bits, const Lanes<W>& yes, const Lanes<W>& no) {
  return select(mask_of_bits<W>(bits), yes, no);
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

template <class W> HVC_INLINE Mask<W> at_least(const Lanes<W>& a, Same<W> bound) {
  return mask_of<Test::greater_equal>(a, bound);
}
template <class W> HVC_INLINE Mask<W> below(const Lanes<W>& a, Same<W> bound) { return mask_of<Test::below>(a, bound); }
template <class Bits, class W> HVC_INLINE Lanes<W> choose(const Bits& bits, const Lanes<W>& yes, const Lanes<W>& no) {
  return select(bits, yes, no);
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
template <class T> HVC_INLINE Lanes<float> load(const T* from) {
  Lanes<float> a;
  for (int i = 0; i < a.kParts; ++i) a.part[i] = load_floats(from + i * a.kPerPart);
  return a;
}

template <class T, class W> HVC_INLINE void store(T* into, const Lanes<W>& a);

// Calls put(place, vector) for 32 elements of type T, in whole vectors.
template <class T, class W, class Put> HVC_INLINE void each_vector(const Lanes<W>& a, const Put& put) {
  if constexpr (std::is_same_v<T, W>) {
    for (int i = 0; i < a.kParts; ++i) put(i * a.kPerPart, (Words)a.part[i]);
  } else if constexpr (sizeof(T) == 2 && sizeof(W) == 4) {
    for (int i = 0; i < a.kParts; i += 2) put(i * a.kPerPart, narrowed(T{}, a.part[i], a.part[i + 1]));
  } else {
    T elements[kLanes];
    store(elements, a);
    constexpr int kPerVector = kWidth / sizeof(T);
    for (int i = 0; i < kLanes; i += kPerVector) put(i, load_vector<Words>(elements + i));
  }
}
template <class T, class W> HVC_INLINE void store(T* into, const Lanes<W>& a) {
  if constexpr (std::is_same_v<T, W> || (sizeof(T) == 2 && sizeof(W) == 4)) {
    each_vector<T>(a, [&](int place, Words v) __attribute__((always_inline)) { store_vector(into + place, v); });
  } else {  // other pairs of types go through the per-element rule
    W wide[kLanes];
    memcpy(wide, a.part, sizeof wide);
    for (int i = 0; i < kLanes; ++i) into[i] = from_work<T>(wide[i]);
  }
}
// Around the cache; `into` is aligned to 64 bytes. In this way 32 lanes are whole cache lines for every type.
template <class T, class W> HVC_INLINE void stream(T* into, const Lanes<W>& a) {
  each_vector<T>(a, [&](int place, Words v) __attribute__((always_inline)) { stream_vector(into + place, v); });
}

// Lanes of float as lanes of double; the identity for the same type.
template <class To, class W> HVC_INLINE Lanes<To> widen(const Lanes<W>& a) {
  W from[kLanes];
  To to[kLanes];
  memcpy(from, a.part, sizeof from);
  for (int i = 0; i < kLanes; ++i) to[i] = To(from[i]);
  return load_native(to);
}

// What is left after the last whole 32 lanes. The compiler learns that it is less, and so makes no second copy of
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
// whole groups of 32, then the rest. Whole groups have a copy of `group` that knows their length, the ends share one.
template <class T, class Group>
HVC_INLINE void each_group(const T* out, int64_t first, int64_t last, const Group& group) {
  const auto end = [&](int64_t i, int64_t count) __attribute__((noinline)) { group(i, rest_of(count), false); };
  int64_t i = first;
  if (const int lead = to_cache_line(out + first, last - first)) {
    end(i, lead);
    i += lead;
  }
  for (; i + kLanes <= last; i += kLanes) group(i, kLanes, true);
  if (i < last) end(i, last - i);
}

template <class T, class W> HVC_INLINE void put(T* into, const Lanes<W>& a, int count, bool around_cache) {
  if (around_cache)
    stream(into, a);
  else
    store(into, a, count);
}
