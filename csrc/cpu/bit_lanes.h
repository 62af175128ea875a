// Bits of 32 lanes: reading and writing them at any position. Included by the bodies of kernels that have bits.

#include "kept_lanes.h"
#include "philox_lanes.h"

// `count` <= 32 bits from bit `begin` on.
HVC_INLINE uint32_t bits_at(const uint64_t* words, int64_t begin, int count) {
  const uint64_t* word = words + begin / kWordBits;
  const int shift = int(begin % kWordBits);
  uint64_t bits = *word >> shift;
  if (shift + count > kWordBits) bits |= word[1] << (kWordBits - shift);
  return uint32_t(bits);
}

// Appends bits at any position. Zeros get their random bit when their word is complete. A range that begins
// inside a word shares that word with the range before it, so it returns its part instead of writing it.
class BitWriter {
 public:
  BitWriter(uint64_t* bits, int64_t begin, Coins* coins)
      : bits_(bits), coins_(coins), word_(begin / kWordBits), fill_(int(begin % kWordBits)), shared_(fill_ != 0) {}

  void put(uint32_t bits, uint32_t zeros, int count) {
    pending_ |= uint64_t(bits) << fill_;
    zeros_ |= uint64_t(zeros) << fill_;
    fill_ += count;
    if (fill_ < kWordBits) return;
    flush();
    fill_ -= kWordBits;
    pending_ = uint64_t(bits) >> (count - fill_);
    zeros_ = uint64_t(zeros) >> (count - fill_);
  }

  // Returns the bits of the shared first word.
  uint64_t finish() {
    if (fill_ != 0) flush();
    return head_;
  }

 private:
  void flush() {
    if (__builtin_expect(zeros_ != 0, 0) && coins_) pending_ |= zeros_ & coins_->word(word_);
    if (shared_)
      head_ = pending_;
    else
      bits_[word_] = pending_;
    shared_ = false;
    ++word_;
  }

  uint64_t* bits_;
  Coins* coins_;
  int64_t word_;
  int fill_;
  bool shared_;
  uint64_t pending_ = 0, zeros_ = 0, head_ = 0;
};

template <class T, class R> HVC_INLINE Lanes<Work<T>> offered(const T* grad, const R* residual, int count) {
  const Lanes<Work<T>> x = load(grad, count);
  return residual ? x + load_kept<Work<T>>(residual, count) : x;
}

// Of a gradient that is divided first, where there is something to divide by.
template <class T, class R>
HVC_INLINE Lanes<Work<T>> offered(const T* grad, const R* residual, const Work<T>* divisor, int count) {
  if (!divisor) return offered(grad, residual, count);
  const Lanes<Work<T>> quotient = load(grad, count) / load(divisor, count);
  const Lanes<Work<T>> x = select(valid_lanes(count), quotient, broadcast(Work<T>(0)));  // absent lanes are 0 / 0
  return residual ? x + load_kept<Work<T>>(residual, count) : x;
}
