// Loops over elements and the bits of their blocks. Compiled once per instruction set.

// Packs whether some element of each block has its bit set, from the beginning of a word on.
class BlockMarks {
 public:
  BlockMarks(uint64_t* word, int64_t block) : word_(word), block_(block), left_(block) {}

  void put(uint32_t some, int count) {
    if (block_ == 1) return push(some, count);
    for (uint64_t rest = some; count > 0;) {
      const int taken = int(std::min<int64_t>(left_, count));
      any_ |= (rest & bits_below(taken)) != 0;
      rest >>= taken;
      count -= taken;
      left_ -= taken;
      if (left_ == 0) close();
    }
  }
  void finish() {
    if (left_ != block_) close();
    if (fill_ != 0) *word_ = pending_;
  }

 private:
  void close() {
    push(any_, 1);
    any_ = false;
    left_ = block_;
  }
  void push(uint32_t bits, int count) {
    pending_ |= uint64_t(bits) << fill_;
    fill_ += count;
    if (fill_ < kWordBits) return;
    *word_++ = pending_;
    pending_ = 0;
    fill_ = 0;
  }

  uint64_t* word_;
  int64_t block_, left_;
  bool any_ = false;
  int fill_ = 0;
  uint64_t pending_ = 0;
};

// Of words [first, last).
int64_t elements_in(const uint64_t* bits, int64_t elements, int64_t block, int64_t first, int64_t last) {
  int64_t sum = 0;
  for (int64_t word = first; word < last; ++word) sum += elements_of(bits[word], word, elements, block);
  return sum;
}

template <class T> int64_t mark(const UnionMarked& t, int64_t block, int64_t first, int64_t last) {
  const auto* grad = static_cast<const T*>(t.grad);
  BlockMarks marks(t.bits + first / (kWordBits * block), block);
  int64_t nonfinite = 0;
  const auto group = [&](int64_t i, int count) __attribute__((always_inline)) {
    const Lanes<Work<T>> x = load(grad + i, count);
    const uint32_t some = ~uint32_t(mask_of<Test::equal>(x)) & valid_lanes(count);
    if (some != 0) nonfinite += __builtin_popcount(~mask_of<Test::below>(magnitude(x), infinity<Work<T>>) & some);
    marks.put(some, count);
  };
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) group(i, kLanes);
  if (i < last) group(i, rest_of(last - i));
  marks.finish();
  return nonfinite;
}

// Reads the bits of elements, 64 at a time, from the beginning of a word on.
class ElementBits {
 public:
  ElementBits(const uint64_t* bits, int64_t block, int64_t i)
      : bits_(bits), block_(block), at_(i / block), left_(block) {}

  uint64_t next(int count) {
    if (block_ == 1) {
      at_ += kWordBits;
      return bits_[at_ / kWordBits - 1] & valid_bits(count);
    }
    uint64_t found = 0;
    for (int from = 0; from < count;) {
      const int taken = int(std::min<int64_t>(left_, count - from));
      if (bits_[at_ / kWordBits] >> (at_ % kWordBits) & 1) found |= valid_bits(taken) << from;
      from += taken;
      left_ -= taken;
      if (left_ != 0) break;
      ++at_;
      left_ = block_;
    }
    return found;
  }

 private:
  static uint64_t valid_bits(int count) { return count == kWordBits ? ~uint64_t(0) : bits_below(count); }

  const uint64_t* bits_;
  int64_t block_, at_, left_;
};

template <class T> void encode(const UnionEncoded& t, int64_t block, int64_t place, int64_t first, int64_t last) {
  using W = Work<T>;
  W* out = static_cast<W*>(t.values) + place;
  const W* const end = static_cast<W*>(t.values) + t.kept;
  ElementBits bits(t.bits, block, first);
  for (int64_t i = first; i < last; i += kWordBits) {
    const int count = int(std::min<int64_t>(kWordBits, last - i));
    const T* const grad = static_cast<const T*>(t.grad) + i;
    uint64_t marked = bits.next(count);
    if (marked == 0) continue;
    if (end - out < ones_of(marked)) return;
    if (marked == ~uint64_t(0)) {
      store(out, load(grad));
      store(out + kLanes, load(grad + kLanes));
      out += kWordBits;
      continue;
    }
    for (; marked != 0; marked &= marked - 1) *out++ = to_work(grad[__builtin_ctzll(marked)]);
  }
}

// Writes results as they are needed, in the arithmetic type, into memory that stays in the cache: a vector of elements
// that were written one by one just before would wait for these.
template <class W> class Results {
 public:
  static constexpr int kMost = 32 * kWordBits;

  Results(const uint64_t* bits, int64_t block, int64_t first, const W* in, const W* end, W factor)
      : bits_(bits, block, first), in_(in), end_(end), factor_(factor) {}

  // The next `count` ones.
  const W* next(int count) {
    memset(memory_, 0, sizeof memory_);
    for (int i = 0; i < count; i += kWordBits) {
      W* const out = memory_ + i;
      uint64_t marked = bits_.next(std::min<int>(kWordBits, count - i));
      if (end_ - in_ < ones_of(marked)) marked = 0;
      if (marked == ~uint64_t(0)) {
        for (int j = 0; j < kWordBits; j += kLanes) store(out + j, load(in_ + j) * broadcast(factor_));
        in_ += kWordBits;
        continue;
      }
      for (; marked != 0; marked &= marked - 1) out[__builtin_ctzll(marked)] = *in_++ * factor_;
    }
    return memory_;
  }

 private:
  ElementBits bits_;
  const W *in_, *const end_;
  const W factor_;
  alignas(64) W memory_[kMost];
};

template <class T> void decode(const UnionDecoded& t, int64_t block, Work<T> factor, bool streamed, int64_t place,
                               int64_t first, int64_t last) {
  using W = Work<T>;
  auto* const grad = static_cast<T*>(t.grad);
  const W* const values = static_cast<const W*>(t.values);
  Results<W> results(t.bits, block, first, values + place, values + t.kept, factor);
  for (int64_t begin = first; begin < last; begin += Results<W>::kMost) {
    const int64_t end = std::min(begin + Results<W>::kMost, last);
    const W* const from = results.next(int(end - begin));
    each_group(grad, begin, end, [&](int64_t i, int count, bool whole) __attribute__((always_inline)) {
      put(grad + i, load(from + (i - begin), count), count, whole && streamed);
    });
  }
  stream_fence();
}
