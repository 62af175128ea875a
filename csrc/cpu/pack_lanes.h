// Chunks of up to kChunk codes of 2 to 8 bits, packed. Included by a body, inside its namespace, after dither_lanes.h.

// Words first, in vectors; then their bytes, which overlap. `count` is a multiple of 8, and whole words are stored:
// `into` has room for 8 bytes after the codes.
template <int kBits> HVC_INLINE void pack_as(uint8_t* into, const int8_t* codes, int count) {
  alignas(64) uint64_t words[kChunk / kPacked];
  memcpy(words, codes, size_t(count));
  for (int i = 0; i < count / kPacked; ++i) words[i] = pack_eight<kBits>(words[i]);
  for (int i = 0; i < count / kPacked; ++i) memcpy(into + i * kBits, words + i, sizeof words[i]);
}
template <int kBits> HVC_INLINE void unpack_as(int8_t* codes, const uint8_t* from, int count) {
  constexpr uint8_t kHalf = 1 << (kBits - 1);
  alignas(64) uint64_t words[kChunk / kPacked];
  const int bytes = count / kPacked * kBits;
  int i = 0;
  // Whole words are loaded where the codes after them are there to be read.
  for (; i * kBits + 8 <= bytes; ++i) memcpy(words + i, from + i * kBits, sizeof words[i]);
  for (; i * kBits < bytes; ++i) {
    words[i] = 0;
    memcpy(words + i, from + i * kBits, kBits);
  }
  for (i = 0; i < count / kPacked; ++i) words[i] = unpack_eight<kBits>(words[i]);
  memcpy(codes, words, size_t(count));
  if constexpr (kBits < 8)
    for (int j = 0; j < count; ++j) codes[j] = int8_t(uint8_t((uint8_t(codes[j]) ^ kHalf) - kHalf));
}

// Calls use(a constant of that value) for 2 to 8 bits.
template <class Use> HVC_INLINE void with_bits(int bits, const Use& use) {
  switch (bits) {
    case 2:
      return use(std::integral_constant<int, 2>());
    case 3:
      return use(std::integral_constant<int, 3>());
    case 4:
      return use(std::integral_constant<int, 4>());
    case 5:
      return use(std::integral_constant<int, 5>());
    case 6:
      return use(std::integral_constant<int, 6>());
    case 7:
      return use(std::integral_constant<int, 7>());
    default:
      return use(std::integral_constant<int, 8>());
  }
}

// `codes` has room for a multiple of 8: those after `count` become 0.
[[maybe_unused]] static void pack_codes_of(int bits, uint8_t* into, int8_t* codes, int count) {
  alignas(64) uint8_t packed[kChunk + 8];
  const int whole = (count + kPacked - 1) / kPacked * kPacked;
  for (int i = count; i < whole; ++i) codes[i] = 0;
  with_bits(bits, [&](auto b) { pack_as<b()>(packed, codes, whole); });
  memcpy(into, packed, size_t(packed_bytes(count, bits)));
}
// `codes` has room for a multiple of 8.
[[maybe_unused]] static void unpack_codes_of(int bits, int8_t* codes, const uint8_t* from, int count) {
  const int whole = count / kPacked * kPacked;
  with_bits(bits, [&](auto b) { unpack_as<b()>(codes, from, whole); });
  if (whole == count) return;
  uint8_t last[kPacked] = {};
  memcpy(last, from + packed_bytes(whole, bits), size_t(packed_bytes(count - whole, bits)));
  with_bits(bits, [&](auto b) { unpack_as<b()>(codes + whole, last, kPacked); });
}

// ---- codes as vectors of numbers --------------------------------------------------------------------------

using Numbers = Native<float>::Vector;

#if HVC_WIDTH > 16
template <int kBits> constexpr int kBytesRead = kFloatsPerVector * kBits > 64 ? 16 : 8;

// As many codes as a vector has lanes. A lane gets the bytes of its code, moves it to the top, and down with its sign.
template <int kBits> HVC_INLINE Numbers numbers_at(const uint8_t* from) {
  Native<float>::Ints bytes, up;
  for (int i = 0; i < kFloatsPerVector; ++i) {
    bytes[i] = 0x03020100 + 0x01010101 * (kBits * i / 8);
    up[i] = 32 - kBits - kBits * i % 8;
  }
  const __m128i packed = kBytesRead<kBits> == 16 ? load_vector<__m128i>(from) : _mm_loadl_epi64((const __m128i*)from);
#if HVC_WIDTH == 64
  const __m512i all = _mm512_maskz_broadcast_i32x4(__mmask16(-1), packed);
  const auto found = (Native<float>::Ints)_mm512_shuffle_epi8(all, (__m512i)bytes);
#else
  const __m256i all = _mm256_broadcastsi128_si256(packed);
  const auto found = (Native<float>::Ints)_mm256_shuffle_epi8(all, (__m256i)bytes);
#endif
  return __builtin_convertvector(found << up >> (32 - kBits), Numbers);
}
#endif

// Calls use(i, the codes from i on) for a multiple of 64 codes.
template <int kBits, class Use> HVC_INLINE void each_numbers(const uint8_t* from, int64_t count, const Use& use) {
#if HVC_WIDTH > 16
  const int64_t bytes = count / 8 * kBits;
  int64_t i = 0;
  for (; i * kBits / 8 + kBytesRead<kBits> <= bytes; i += kFloatsPerVector)
    use(i, numbers_at<kBits>(from + i * kBits / 8));
  for (; i < count; i += kFloatsPerVector) {
    uint8_t last[16] = {};
    memcpy(last, from + i * kBits / 8, kFloatsPerVector * kBits / 8);
    use(i, numbers_at<kBits>(last));
  }
#else
  alignas(64) int8_t codes[kChunk];
  alignas(64) float numbers[kChunk];
  for (int64_t at = 0; at < count; at += kChunk) {
    const int chunk = int(std::min<int64_t>(kChunk, count - at));
    unpack_as<kBits>(codes, from + at / 8 * kBits, chunk);
    each_element(chunk, [&](int i) { numbers[i] = float(codes[i]); });
    for (int i = 0; i < chunk; i += kFloatsPerVector) use(at + i, load_vector<Numbers>(numbers + i));
  }
#endif
}
