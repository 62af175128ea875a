// CRC-32C, with and without a copy. The processor's instruction takes three cycles but can start one every cycle,
// so three streams run side by side and are joined by a multiplication. Elsewhere: eight tables.
#include "rules/crc32c.h"

#include "isa.h"
#include "kernels.h"

#if defined(HVC_X86)
#include <immintrin.h>
#endif

namespace hvc {
namespace {

constexpr CrcTables kTables = make_crc_tables();

HVC_RULE uint64_t read_word(const uint8_t* from) {
  uint64_t word;
  memcpy(&word, from, sizeof word);
  return word;
}

// Reads one word and, when there is somewhere to write, copies it.
template <bool kCopy> HVC_RULE uint64_t take_word(const uint8_t* from, uint8_t* into, int64_t at) {
  const uint64_t word = read_word(from + at);
  if (kCopy) memcpy(into + at, &word, sizeof word);
  return word;
}

// `crc` is the bare register in all of these.
template <bool kCopy> HVC_RULE uint32_t crc_bytes(const uint8_t* from, uint8_t* into, int64_t bytes, uint32_t crc) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (kCopy) into[i] = from[i];
    crc = crc >> 8 ^ kTables.entry[0][(crc ^ from[i]) & 0xff];
  }
  return crc;
}

template <bool kCopy> uint32_t crc_tables(const uint8_t* from, uint8_t* into, int64_t bytes, uint32_t crc) {
  int64_t i = 0;
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; i + 8 <= bytes; i += 8) {
    const uint64_t word = take_word<kCopy>(from, into, i) ^ crc;
    crc = 0;
    for (int byte = 0; byte < 8; ++byte) crc ^= kTables.entry[7 - byte][word >> (8 * byte) & 0xff];
  }
#endif
  return crc_bytes<kCopy>(from + i, kCopy ? into + i : nullptr, bytes - i, crc);
}

#if defined(HVC_X86)

#pragma GCC push_options
#pragma GCC target("sse4.2")

// The longer the streams, the seldomer the prefetcher starts anew: 28 against 15 GB/s for 128 against 8 KiB.
// As many rounds of three streams of kStream bytes each as fit; advances `at`.
template <bool kCopy, int64_t kStream>
HVC_RULE uint32_t crc_streams(const uint8_t* from, uint8_t* into, int64_t bytes, int64_t& at, uint32_t crc) {
  constexpr uint32_t kOne = crc_zeros(kStream), kTwo = crc_zeros(2 * kStream);
  for (; bytes - at >= 3 * kStream; at += 3 * kStream) {
    uint64_t a = crc, b = 0, c = 0;
    for (int64_t i = at; i < at + kStream; i += 8) {
      a = _mm_crc32_u64(a, take_word<kCopy>(from, into, i));
      b = _mm_crc32_u64(b, take_word<kCopy>(from, into, i + kStream));
      c = _mm_crc32_u64(c, take_word<kCopy>(from, into, i + 2 * kStream));
    }
    crc = crc_multiply(uint32_t(a), kTwo) ^ crc_multiply(uint32_t(b), kOne) ^ uint32_t(c);
  }
  return crc;
}

template <bool kCopy> uint32_t crc_hardware(const uint8_t* from, uint8_t* into, int64_t bytes, uint32_t crc) {
  int64_t at = 0;
  crc = crc_streams<kCopy, 131072>(from, into, bytes, at, crc);
  crc = crc_streams<kCopy, 16384>(from, into, bytes, at, crc);
  crc = crc_streams<kCopy, 512>(from, into, bytes, at, crc);
  uint64_t wide = crc;
  for (; at + 8 <= bytes; at += 8) wide = _mm_crc32_u64(wide, take_word<kCopy>(from, into, at));
  return crc_bytes<kCopy>(from + at, kCopy ? into + at : nullptr, bytes - at, uint32_t(wide));
}

#pragma GCC pop_options

template <bool kCopy> uint32_t crc_any(const uint8_t* from, uint8_t* into, int64_t bytes, uint32_t crc) {
  const auto run = isa() == Isa::generic ? &crc_tables<kCopy> : &crc_hardware<kCopy>;
  return ~run(from, into, bytes, ~crc);
}

#else

template <bool kCopy> uint32_t crc_any(const uint8_t* from, uint8_t* into, int64_t bytes, uint32_t crc) {
  return ~crc_tables<kCopy>(from, into, bytes, ~crc);
}

#endif

}  // namespace

uint32_t crc32c(const void* data, int64_t bytes, uint32_t crc) {
  return crc_any<false>(static_cast<const uint8_t*>(data), nullptr, bytes, crc);
}

uint32_t crc32c_copy(void* into, const void* from, int64_t bytes, uint32_t crc) {
  return crc_any<true>(static_cast<const uint8_t*>(from), static_cast<uint8_t*>(into), bytes, crc);
}

}  // namespace hvc
