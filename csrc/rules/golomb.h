// Positions of kept elements as Golomb codes, in ranges that decode apart from each other.
//
//   section   the value of all kept elements, one uint32 per range: the bytes of its stream, then the streams
//   range     2^(b+11) consecutive elements, for the parameter b <= 20; the last one may be shorter
//   stream    for each kept position: gap = the elements between it and the one before it, or the range's start;
//             gap >> b ones, a zero, the b low bits of the gap, lowest first; bits are packed lowest first
//
// A stream is padded with ones to whole bytes: no code word is made of ones alone. What follows the streams in a
// section is nobody's and is ignored. A range is malformed where its stream leaves the section, or a position the
// range, or where the stream ends inside a code word; of such a range the positions before count.
#pragma once
#include "rules/common.h"

namespace hvc {

constexpr int kMaxParameter = 20;
constexpr int kMostOnes = (1 << 11) - 1;  // the unary part of the longest gap that a range holds

struct Section {
  const uint8_t* data;
  int64_t bytes;
};

HVC_RULE int64_t range_elements(int parameter) { return int64_t(1) << (parameter + 11); }
HVC_RULE int64_t ranges_for(int64_t count, int parameter) { return ceil_div(count, range_elements(parameter)); }
HVC_RULE int64_t streams_begin(int value_bytes, int64_t ranges) { return value_bytes + 4 * ranges; }

// Too short to hold the value and the lengths of the streams: then every range is malformed, and at least one.
HVC_RULE bool too_short(const Section& s, int value_bytes, int64_t ranges) {
  return s.bytes < streams_begin(value_bytes, ranges);
}

// Where a section ends that begins at place[0]; -1 if it could not be written.
HVC_RULE void put_end(int64_t bytes, int64_t* place) { place[1] = bytes < 0 ? -1 : place[0] + bytes; }

// Unaligned, little-endian.
template <class I> HVC_RULE I load_bytes(const uint8_t* from) {
  I value = 0;
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(I) < 4) {
    for (unsigned i = 0; i < sizeof(I); ++i) value |= I(I(from[i]) << (8 * i));
  } else {
    // Aligned words, none of which is without a byte that was asked for.
    const auto address = reinterpret_cast<uintptr_t>(from);
    const auto* words = reinterpret_cast<const uint32_t*>(address - address % 4);
    const auto shift = unsigned(8 * (address % 4));
    uint32_t word = words[0];
    for (unsigned i = 0; i < sizeof(I) / 4; ++i) {
      const bool last = i + 1 == sizeof(I) / 4;
      const uint32_t next = last && shift == 0 ? 0u : words[i + 1];
      value |= I(__funnelshift_r(word, next, shift)) << (32 * i);
      word = next;
    }
  }
#else
  memcpy(&value, from, sizeof value);  // g++ does not make one load of the loop
#endif
  return value;
}

HVC_RULE void store_bytes(uint8_t* into, uint32_t value) {
  for (int i = 0; i < 4; ++i) into[i] = uint8_t(value >> (8 * i));
}

HVC_RULE int64_t stream_bytes(const Section& s, int value_bytes, int64_t range) {
  return load_bytes<uint32_t>(s.data + value_bytes + 4 * range);
}

template <class W> HVC_RULE W section_value(const Section& s) {
  W value;
  memcpy(&value, s.data, sizeof value);
  return value;
}

HVC_RULE int trailing_ones(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return word == ~uint64_t(0) ? 64 : __ffsll(static_cast<long long>(~word)) - 1;
#else
  return word == ~uint64_t(0) ? 64 : __builtin_ctzll(~word);
#endif
}

// Bits, lowest first. Writes whole bytes and never one too many.
class StreamWriter {
 public:
  HVC_RULE explicit StreamWriter(uint8_t* at) : at_(at) {}

  HVC_RULE void put_code(uint32_t gap, int parameter) {
    uint32_t ones = gap >> parameter;
    const uint64_t low = gap & ((uint32_t(1) << parameter) - 1);
    const int rest = parameter + 1;
    for (; int(ones) + rest > 32; ones -= 11) put(0x7ff, 11);
    put(((uint64_t(1) << ones) - 1) | low << (ones + 1), int(ones) + rest);
  }

  // Fills the last byte with ones; returns where the next stream begins.
  HVC_RULE uint8_t* finish() {
    if (filled_ % 8 != 0) put((1u << (8 - filled_ % 8)) - 1, 8 - filled_ % 8);
    for (; filled_ > 0; filled_ -= 8, pending_ >>= 8) *at_++ = uint8_t(pending_);
    return at_;
  }

  // At most 32 bits.
  HVC_RULE void put(uint64_t bits, int length) {
    pending_ |= bits << filled_;
    filled_ += length;
    if (filled_ < 32) return;
    store_bytes(at_, uint32_t(pending_));
    at_ += 4;
    pending_ >>= 32;
    filled_ -= 32;
  }

 private:
  uint8_t* at_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

// The positions of one range, one after the other. Reads nothing outside its stream, whatever the bytes are.
class GolombReader {
 public:
  HVC_RULE GolombReader() {}
  HVC_RULE GolombReader(const uint8_t* data, int64_t bytes, int parameter, int64_t begin, int64_t end)
      : data_(data), bits_(8 * bytes), next_(begin), end_(end), parameter_(parameter) {
    advance();
  }

  // Of a stream that cannot be read at all.
  static HVC_RULE GolombReader broken() {
    GolombReader reader;
    reader.malformed_ = true;
    return reader;
  }

  // The position that advance() found; past every position when there is none.
  HVC_RULE int64_t position() const { return position_; }
  HVC_RULE bool malformed() const { return malformed_; }

  HVC_RULE void advance() {
    int64_t ones, low;
    position_ = kNone;
    if (at_ + 64 <= bits_) {
      const uint64_t word = load_bytes<uint64_t>(data_ + at_ / 8) >> (at_ % 8);
      const int run = trailing_ones(word), length = run + 1 + parameter_;
      if (length <= 56) {
        at_ += length;
        return arrive(run, int64_t(word >> (run + 1) & mask()));
      }
    }
    if (read_slowly(ones, low)) arrive(ones, low);
  }

  static constexpr int64_t kNone = int64_t(1) << 62;

 private:
  HVC_RULE uint64_t mask() const { return (uint64_t(1) << parameter_) - 1; }
  HVC_RULE bool bit(int64_t at) const { return (data_[at / 8] >> (at % 8) & 1) != 0; }

  HVC_RULE void arrive(int64_t ones, int64_t low) {
    const int64_t position = next_ + (ones << parameter_) + low;
    if (position >= end_) {
      malformed_ = true;
    } else {
      position_ = position;
      next_ = position + 1;
    }
  }

  // Long code words and the last ones of a stream, bit by bit; false at the end.
  HVC_RULE bool read_slowly(int64_t& ones, int64_t& low) {
    int64_t at = at_;
    while (at < bits_ && bit(at) && at - at_ <= kMostOnes) ++at;
    ones = at - at_, low = 0;
    if (at >= bits_ && ones < 8) return false;  // padding
    if (at + 1 + parameter_ > bits_) {
      malformed_ = true;
      return false;
    }
    for (int i = 0; i < parameter_; ++i) low |= int64_t(bit(at + 1 + i)) << i;
    at_ = at + 1 + parameter_;
    return true;
  }

  const uint8_t* data_ = nullptr;
  int64_t bits_ = 0, at_ = 0, next_ = 0, end_ = 0, position_ = kNone;
  int parameter_ = 0;
  bool malformed_ = false;
};

// Reader of one range of a section. `offset` is where its stream begins: the lengths of those before it, added up.
HVC_RULE GolombReader reader_of(const Section& s, int value_bytes, int parameter, int64_t count, int64_t range,
                                int64_t offset) {
  const int64_t begin = range * range_elements(parameter), end = begin + range_elements(parameter);
  const int64_t at = streams_begin(value_bytes, ranges_for(count, parameter)) + offset;
  const int64_t bytes = stream_bytes(s, value_bytes, range);
  if (at + bytes > s.bytes) return GolombReader::broken();
  return GolombReader(s.data + at, bytes, parameter, begin, end < count ? end : count);
}

}  // namespace hvc
