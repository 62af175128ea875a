// What the dithering loops share: chunks of elements, their random bits, and numbers in and out. Included by a body,
// inside its namespace, after lanes.h.
#include "philox_lanes.h"

constexpr int kChunk = 256;

// 16 random bits for each of up to kChunk consecutive elements.
class Draws {
 public:
  explicit Draws(const Stream& s) : schedule_(s), drawn_(s.drawn), shift_(Shorts{} + uint16_t(s.shift)) {
    if (!drawn_) std::fill_n(draws_, kChunk, uint16_t(s.shift));
  }

  // Draws for the elements from `element` on, and returns where they lie.
  const uint16_t* from(int64_t element, int count) {
    if (!drawn_) return draws_;
    const int64_t group = element / kDrawsPerGroup;
    const int shift = int(element % kDrawsPerGroup);
    const int words = (shift + count + kDrawsPerWord - 1) / kDrawsPerWord;
    for (int word = 0; word < words; word += kWordsPerPairs) {
      Pairs pairs;
      Words first, second;
      random_pairs<1>(schedule_, counting_from(uint64_t(group + word / 2)), 0, &pairs);
      interleave(pairs, first, second);
      store_vector(draws_ + word * kDrawsPerWord, (Shorts)first + shift_);
      store_vector(draws_ + word * kDrawsPerWord + kWordsPerVector * kDrawsPerWord, (Shorts)second + shift_);
    }
    return draws_ + shift;
  }

 private:
  typedef uint16_t Shorts __attribute__((vector_size(sizeof(Words))));

  Schedule schedule_;
  bool drawn_;
  Shorts shift_;
  alignas(64) uint16_t draws_[kChunk + kDrawsPerGroup + kWordsPerPairs * kDrawsPerWord];
};

// Calls part(row, begin, count) for [first, last), cut at the ends of chunks and of rows.
template <class Part> HVC_INLINE void each_part(int64_t first, int64_t last, int64_t row_length, const Part& part) {
  for (int64_t row = first / row_length; first < last; ++row) {
    const int64_t row_end = std::min(last, (row + 1) * row_length);
    while (first < row_end) {
      const int64_t end = std::min(row_end, first - first % kChunk + kChunk);
      part(row, first, int(end - first));
      first = end;
    }
  }
}

// A loop whose length the compiler knows where the chunk is whole.
template <class Body> HVC_INLINE void each_element(int count, const Body& body) {
  if (__builtin_expect(count == kChunk, 1)) {
    for (int i = 0; i < kChunk; ++i) body(i);
  } else {
    for (int i = 0; i < count; ++i) body(i);
  }
}

template <class T> HVC_INLINE void scale_part(const T* grad, int count, const Scaling<Work<T>>& scaling, float* z) {
  each_element(count, [&](int i) { z[i] = scaled(Work<T>(to_work(grad[i])), scaling); });
}

// Values to the gradient, around the cache where whole lines can be.
template <class T> HVC_INLINE void put_part(T* into, const Work<T>* values, int count, bool streamed) {
  const bool whole = streamed && count % kLanes == 0 && reinterpret_cast<uintptr_t>(into) % 64 == 0;
  for (int i = 0; i < count; i += kLanes) {
    if (whole)
      stream(into + i, load_native(values + i));
    else
      store(into + i, load(values + i, std::min(count - i, kLanes)), std::min(count - i, kLanes));
  }
}

// Codes of four bits to and from two in a byte, the even element low. `codes` has room for one more.
HVC_INLINE void pack_codes(uint8_t* into, uint8_t* codes, int count) {
  if (count % 2 != 0) codes[count] = 0;
  for (int i = 0; i < (count + 1) / 2; ++i) into[i] = uint8_t((codes[2 * i] & 15u) | unsigned(codes[2 * i + 1]) << 4);
}
HVC_INLINE void unpack_codes(const uint8_t* from, uint8_t* codes, int count) {
  for (int i = 0; i < (count + 1) / 2; ++i) {
    codes[2 * i] = from[i] & 15;
    codes[2 * i + 1] = uint8_t(from[i] >> 4);
  }
}
