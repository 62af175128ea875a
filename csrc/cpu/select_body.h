// The pass over the whole tensor. Compiled once per instruction set.

// Appends the lanes of the mask, in order. Writes up to one vector further, which the list has room for.
template <class W> HVC_INLINE void append(Candidates<W>& list, const Lanes<W>& x, uint32_t mask, int64_t position) {
#if HVC_WIDTH == 64
  // Without a branch: which groups hold candidates cannot be predicted.
  constexpr int kPerPart = Lanes<W>::kPerPart;
  const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int part = 0; part < Lanes<W>::kParts; ++part) {
    const uint32_t chosen = mask >> (part * kPerPart) & ((1u << kPerPart) - 1);
    const auto first = int(uint32_t(position) + uint32_t(part * kPerPart));  // of absent lanes it may pass 2^31
    const __m512i positions = _mm512_add_epi32(_mm512_set1_epi32(first), steps);
    W* values = list.values + list.size;
    if constexpr (sizeof(W) == 4)
      store_vector(values, _mm512_maskz_compress_ps(__mmask16(chosen), (__m512)x.part[part]));
    else
      store_vector(values, _mm512_maskz_compress_pd(__mmask8(chosen), (__m512d)x.part[part]));
    store_vector(list.positions + list.size, _mm512_maskz_compress_epi32(__mmask16(chosen), positions));
    list.size += __builtin_popcount(chosen);
  }
#else
  if (mask == 0) return;
  W lanes[kLanes];
  memcpy(lanes, x.part, sizeof lanes);
  for (; mask != 0; mask &= mask - 1) {
    const int lane = __builtin_ctz(mask);
    list.values[list.size] = lanes[lane];
    list.positions[list.size++] = int32_t(position + lane);
  }
#endif
}

template <int kSides, class W> HVC_INLINE uint32_t beyond(const Lanes<W>& x, const W* above) {
  if constexpr (kSides == kTogether) return mask_of<Test::greater>(magnitude(x), above[0]);
  return mask_of<Test::greater>(x, above[0]) | mask_of<Test::below>(x, W(-above[1]));
}

// Collects what lies beyond the bounds from `first` on; returns where it stopped: at `last`, or as the list was full.
template <int kSides, bool kResidual, class T>
HVC_INLINE int64_t sift_elements(const Input<T>& in, const Work<T>* above, int64_t first, int64_t last,
                                 Candidates<Work<T>>& list, int64_t& nonfinite) {
  using W = Work<T>;
  const W bounds[2] = {above[0], above[kSides - 1]};
  Candidates<W> found = list;
  int64_t bad = 0, i = first;
  const auto group = [&](int count) {
    Lanes<W> x = load(in.grad + i, count);  // absent lanes are zeros, which are never kept
    if (kResidual) x = x + load(in.residual + i, count);
    bad += __builtin_popcount(~mask_of<Test::below>(magnitude(x), infinity<W>));
    append(found, x, beyond<kSides>(x, bounds), i);
    i += count;
  };
  while (i + kLanes <= last && found.size + kLanes <= found.capacity) group(kLanes);
  if (i < last && found.size + kLanes <= found.capacity) group(int(last - i));
  list = found;
  nonfinite += bad;
  return i;
}

template <int kSides, class T> int64_t sift(const Input<T>& in, const Work<T>* above, int64_t first, int64_t last,
                                            Candidates<Work<T>>& list, int64_t& nonfinite) {
  return in.residual ? sift_elements<kSides, true>(in, above, first, last, list, nonfinite)
                     : sift_elements<kSides, false>(in, above, first, last, list, nonfinite);
}
