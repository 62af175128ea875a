// Levels as Elias gamma codes, in ranges that decode apart from each other.
//
//   section   one uint32 per range: the bytes of its stream; then the norm of every block, float32; then the streams
//   range     as many whole blocks as 8192 elements hold; the last one may be shorter
//   stream    for each level that is not 0: gamma of the elements between it and the one before it (or the range's
//             start) + 1, a bit for the sign, 1 for minus, gamma of the level's magnitude. After the last one, gamma
//             of the elements that are left + 1, if any are left.
//   gamma     of k >= 1: floor(log2 k) zeros, a one, the bits of k below its highest, lowest first
//
// Bits are packed lowest first, and the last byte is filled with ones. A range is malformed where its stream leaves the
// section, a position the range, a level the levels, or where the stream ends inside a code.
#pragma once
#include "rules/golomb.h"
#include "rules/qsgd.h"

namespace hvc {

constexpr int64_t kEliasRange = 8192;

HVC_RULE int64_t blocks_in_range(int64_t block) { return block < kEliasRange ? kEliasRange / block : 1; }
HVC_RULE int64_t elias_ranges(int64_t count, int64_t block) { return ceil_div(count, blocks_in_range(block) * block); }

HVC_RULE int highest_bit(uint32_t k) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(int(k));
#else
  return 31 - __builtin_clz(k);
#endif
}
HVC_RULE int lowest_one(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

// ---- levels for a bound of the error ----------------------------------------------------------------------

// The largest norm of those it tries with which a block, rounded to the nearest level, is off by no more than a share
// of its squares. Errors grow about as the square of the distance of levels: each try is where the last one would have
// met the bound. The norm of the largest |x| meets it always, where the share is at least block / levels^2
// and a float32 can hold that norm.
class WidestNorm {
 public:
  HVC_RULE WidestNorm(double share, double squares, double largest, int64_t count, int32_t levels)
      : most_(share * squares), best_(norm_at_least(largest)), next_(best_), left_(most_ > 0 ? kTries : 0) {
    // Where errors are spread evenly over a level, as of many values they almost are.
    tries(kSafely * (double(levels) * sqrt(12.0 * most_ / double(count))));
  }

  // Whether there is another one to try; lost() says what it lost, in squares.
  HVC_RULE bool more() const { return left_ > 0; }
  HVC_RULE float next() const { return next_; }
  HVC_RULE void lost(double squares) {
    const bool good = squares <= most_;
    if (good && next_ > best_) best_ = next_;
    left_ = good && squares >= kNear * most_ ? 0 : left_ - 1;
    const double factor = kSafely * sqrt(most_ / squares);
    tries(double(next_) * (factor < 2.0 ? factor : 2.0));  // not by far where hardly anything was lost
  }

  HVC_RULE float best() const { return best_; }

 private:
  static constexpr int kTries = 6;
  static constexpr double kNear = 0.9, kSafely = 1.0 - 1.0 / 64.0;

  HVC_RULE void tries(double norm) {
    const float at_least = norm_at_least(norm);
    next_ = at_least > best_ ? at_least : best_;
  }

  double most_;
  float best_, next_;
  int left_;
};

// ---- codes ------------------------------------------------------------------------------------------------

struct Gamma {
  uint32_t bits;
  int length;
};

HVC_RULE Gamma gamma_of(uint32_t k) {
  const int low = highest_bit(k);
  return {1u << low | (k ^ 1u << low) << (low + 1), 2 * low + 1};
}

// One stream. Reads nothing outside it, whatever the bytes are. It may go on after a faster reader, which has read
// `at` bits, up to element `next`.
class EliasReader {
 public:
  HVC_RULE EliasReader(const uint8_t* data, int64_t bytes, int64_t elements, int32_t levels, int64_t at = 0,
                       int64_t next = 0)
      : data_(data), bits_(8 * bytes), elements_(elements), levels_(levels), at_(at), next_(next) {}

  // Finds the next level that is not 0; false at the end.
  HVC_RULE bool next(int64_t& position, int32_t& level) {
    if (next_ >= elements_ || malformed_) return false;
    uint64_t word = peek();
    const int64_t gap = int64_t(gamma(word)) - 1;
    if (malformed_ || gap > elements_ - next_) return broken();
    position = next_ + gap;
    next_ = position + 1;
    if (position == elements_) return at_ > bits_ ? broken() : false;
    const bool negative = (word & 1u) != 0;
    word >>= 1, ++at_;
    const auto magnitude = int32_t(gamma(word));
    if (malformed_ || at_ > bits_ || magnitude > levels_) return broken();
    level = negative ? -magnitude : magnitude;
    return true;
  }

  HVC_RULE bool malformed() const { return malformed_; }

 private:
  static constexpr int kMostZeros = 13;  // a range has no more than 2^13 elements

  HVC_RULE bool broken() {
    malformed_ = true;
    return false;
  }

  // At least 57 bits from the place that is reached, zeros past the end: two codes and a sign take 41 at most.
  HVC_RULE uint64_t peek() const {
    const int64_t byte = at_ / 8, left = bits_ / 8 - byte;
    uint64_t word = 0;
    if (left >= 8)
      word = load_bytes<uint64_t>(data_ + byte);
    else
      for (int64_t i = 0; i < left; ++i) word |= uint64_t(data_[byte + i]) << (8 * i);
    return word >> (at_ % 8);
  }

  HVC_RULE uint32_t gamma(uint64_t& word) {
    const int low = word == 0 ? kMostZeros + 1 : lowest_one(word);
    if (low > kMostZeros) return broken(), 1u;
    const auto k = uint32_t(1u << low | (word >> (low + 1) & ((1u << low) - 1)));
    word >>= 2 * low + 1;
    at_ += 2 * low + 1;
    return k;
  }

  const uint8_t* data_;
  int64_t bits_, elements_;
  int32_t levels_;
  int64_t at_, next_;
  bool malformed_ = false;
};

}  // namespace hvc
