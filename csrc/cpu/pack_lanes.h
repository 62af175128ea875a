// Chunks of up to kChunk codes of 2 to 8 bits, packed. Included by a body, inside its namespace, after dither_lanes.h.

// Words first, in vectors; then their bytes, which overlap. `count` is a multiple of 8, and whole words are stored:
// `into` has room for 8 bytes behind the codes.
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
  // Whole words are loaded where the codes behind are there to be read.
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

// `codes` has room for a multiple of 8: those behind `count` become 0.
static void pack_codes_of(int bits, uint8_t* into, int8_t* codes, int count) {
  alignas(64) uint8_t packed[kChunk + 8];
  const int whole = (count + kPacked - 1) / kPacked * kPacked;
  for (int i = count; i < whole; ++i) codes[i] = 0;
  with_bits(bits, [&](auto b) { pack_as<b()>(packed, codes, whole); });
  memcpy(into, packed, size_t(packed_bytes(count, bits)));
}
// `codes` has room for a multiple of 8.
static void unpack_codes_of(int bits, int8_t* codes, const uint8_t* from, int count) {
  const int whole = count / kPacked * kPacked;
  with_bits(bits, [&](auto b) { unpack_as<b()>(codes, from, whole); });
  if (whole == count) return;
  uint8_t last[kPacked] = {};
  memcpy(last, from + packed_bytes(whole, bits), size_t(packed_bytes(count - whole, bits)));
  with_bits(bits, [&](auto b) { unpack_as<b()>(codes + whole, last, kPacked); });
}
