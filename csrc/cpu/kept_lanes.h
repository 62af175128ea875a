// What is kept of 32 elements: of the arithmetic type, or of 16 bits, as rules/kept.h says.

// 0, 1, 2, ...
HVC_INLINE Singles lane_numbers() {
  Singles v;
  for (int i = 0; i < kFloatsPerVector; ++i) v[i] = uint32_t(i);
  return v;
}

// What is kept, of type R, which is void for nothing.
template <class R, class W> HVC_INLINE auto kept_at(const void* kept) {
  using Kept = std::conditional_t<std::is_void_v<R>, W, R>;
  return std::is_void_v<R> ? nullptr : static_cast<const Kept*>(kept);
}

template <class W, class R> HVC_INLINE Lanes<W> load_kept(const R* from, int count) {
  if constexpr (std::is_same_v<decltype(load(from, count)), Lanes<W>>)
    return load(from, count);
  else
    return widen<W>(load(from, count));
}

// Where numbers are rounded, `element` is that of the first one in the bucket.
HVC_INLINE void store_kept(float* into, const Lanes<float>& a, int count, int64_t, const KeptDraws&) {
  store(into, a, count);
}
HVC_INLINE void store_kept(double* into, const Lanes<double>& a, int count, int64_t, const KeptDraws&) {
  store(into, a, count);
}
HVC_INLINE void store_kept(BFloat16* into, const Lanes<float>& a, int count, int64_t element, const KeptDraws& draws) {
  BFloat16 padded[kLanes], *out = count == kLanes ? into : padded;
  Singles place = lane_numbers() * draws.factor + (uint32_t(element) * draws.factor + draws.moved);
  for (int i = 0; i < Lanes<float>::kParts; i += 2) {
    const Singles first = short_bits((Singles)a.part[i], place);
    place += kFloatsPerVector * draws.factor;
    store_vector(out + i * kFloatsPerVector, join_16_bits(first, short_bits((Singles)a.part[i + 1], place)));
    place += kFloatsPerVector * draws.factor;
  }
  if (count != kLanes) memcpy(static_cast<void*>(into), padded, size_t(count) * sizeof *into);
}
HVC_INLINE void store_kept(BFloat16* into, const Lanes<double>& a, int count, int64_t element, const KeptDraws& draws) {
  double wide[kLanes];
  float narrow[kLanes];
  memcpy(wide, a.part, sizeof wide);
  for (int i = 0; i < kLanes; ++i) narrow[i] = kept_float(wide[i]);
  store_kept(into, load(narrow), count, element, draws);
}
