// The majority of many bit vectors. Compiled once per instruction set.

constexpr int kTile = 32;  // words of every part that are counted together: all planes stay in the first cache
constexpr int kTileVectors = kTile / kWordsPerVector;

struct Plane {
  Words vector[kTileVectors];
};

// Vector by vector: a compiler copies a structure of this size with a slow string instruction.
HVC_INLINE void copy(Plane& into, const Plane& from) {
  for (int i = 0; i < kTileVectors; ++i) into.vector[i] = from.vector[i];
}
HVC_INLINE void fill(Plane& plane, Words value) {
  for (auto& vector : plane.vector) vector = value;
}

HVC_INLINE void load_tile(Plane& plane, const uint64_t* from, int64_t words) {
  if (words < kTile) {
    fill(plane, Words{});
    memcpy(&plane, from, size_t(words) * sizeof(uint64_t));
  } else {
    for (int i = 0; i < kTileVectors; ++i) plane.vector[i] = load_vector<Words>(from + i * kWordsPerVector);
  }
}
HVC_INLINE void store_tile(uint64_t* into, const Plane& plane, int64_t words) {
  if (words < kTile)
    memcpy(into, &plane, size_t(words) * sizeof(uint64_t));
  else
    for (int i = 0; i < kTileVectors; ++i) store_vector(into + i * kWordsPerVector, plane.vector[i]);
}

// A carry-save counter: `sum` holds each digit, `waiting` a second bit of the same weight until a third arrives.
// Every full adder then swallows two bits at once, so a part costs one full adder, whatever the number of parts.
class Counter {
 public:
  void add(Plane& carry) {
    int level = 0;
    for (; count_ >> level & 1; ++level)
      for (int i = 0; i < kTileVectors; ++i)
        full_add(sum_[level].vector[i], waiting_[level].vector[i], carry.vector[i]);
    copy(waiting_[level], carry);
    if (level == levels_) fill(sum_[levels_++], Words{});
    ++count_;
  }

  // Bits of the lanes whose count reaches the threshold.
  Plane reaching(int64_t threshold) {
    Plane result, carry;
    fill(result, ~Words{});
    fill(carry, Words{});
    for (int level = 0; count_ >> level != 0; ++level) {
      const bool waits = count_ >> level & 1;
      for (int i = 0; i < kTileVectors; ++i) {
        const Words other = waits ? waiting_[level].vector[i] : Words{};
        full_add(sum_[level].vector[i], other, carry.vector[i]);
        at_least(threshold >> level & 1, sum_[level].vector[i], result.vector[i]);
      }
    }
    return result;
  }

 private:
  Plane sum_[kMaxPlanes], waiting_[kMaxPlanes];
  int64_t count_ = 0;
  int levels_ = 0;
};

void fold(const uint64_t* const* parts, int64_t part_count, int64_t count, uint64_t* out, int64_t first, int64_t last) {
  for (int64_t word = first; word < last; word += kTile) {
    const int64_t words = std::min<int64_t>(kTile, last - word);
    Counter counter;
    for (int64_t p = 0; p < part_count; ++p) {
      Plane bits;
      load_tile(bits, parts[p] + word, words);
      counter.add(bits);
    }
    const Plane majority = counter.reaching(majority_threshold(part_count));
    store_tile(out + word, majority, words);
  }
  if (last == words_for(count) && last > first) out[last - 1] &= valid_bits(last - 1, count);
}
