// A unit of blocks, added to its counters. Compiled once per instruction set.

#include "philox_lanes.h"
#include "sketch_lanes.h"

constexpr int kGroupsTogether = kWordsPerVector;

// The random words of consecutive groups.
struct Drawn {
  alignas(64) uint32_t signs[kGroupsTogether][kSketchBlock], turns[kGroupsTogether][kNormLayers];

  HVC_RULE Drawn(const Schedule& schedule, uint64_t first_block) {
    Words groups;
    for (int i = 0; i < kGroupsTogether; ++i) groups[i] = norm_counter(first_block + uint64_t(i) * kNormGroup);
    Pairs pairs[kNormDigits];
    random_pairs<kNormDigits>(schedule, groups, 0, pairs);
    for (int i = 0; i < kGroupsTogether; ++i) {
      for (int digit = 0; digit < kNormDigits; ++digit) {
        const uint64_t halves[] = {pairs[digit].even[i], pairs[digit].odd[i]};
        memcpy(digit < 4 ? signs[i] + 4 * digit : turns[i], halves, sizeof halves);
      }
    }
  }
};

// The signs of a block's elements, for one block of a group after the other.
template <class W> class BlockSigns {
 public:
  HVC_RULE explicit BlockSigns(const uint32_t* words) {
    alignas(64) Int<W> bits[kSketchBlock];
    for (int i = 0; i < kSketchBlock; ++i) bits[i] = Int<W>(uint64_t(words[i]) << (8 * sizeof(W) - 32));
    for (int part = 0; part < kBlockParts<W>; ++part) bits_[part] = load_vector<IntsOf<W>>(bits + part * kPerPart<W>);
  }
  HVC_RULE VectorOf<W> apply(int part, VectorOf<W> x) const {
    const IntsOf<W> minus_zero = IntsOf<W>{} + ~IntOf<W>::kMagnitude;
    return (VectorOf<W>)((IntsOf<W>)x ^ (bits_[part] & minus_zero));
  }
  HVC_RULE void next() {
    for (auto& bits : bits_) bits <<= 1;
  }

 private:
  IntsOf<W> bits_[kBlockParts<W>];
};

// The first `blocks` blocks of a layer, added to the counters.
template <class W>
HVC_INLINE void add_layer(W* table, const W* x, int blocks, int places, NormTurn turn, BlockSigns<W>& signs) {
  const uint32_t in_part = turn.element() % kPerPart<W>, part_turn = turn.element() / kPerPart<W>;
  for (int block = 0; block < blocks; ++block, x += kSketchBlock, signs.next()) {
    W* const cells = table + turn.place(uint32_t(block), places) * kSketchBlock;
    for (int part = 0; part < kBlockParts<W>; ++part) {
      const VectorOf<W> more = signs.apply(part, load_vector<VectorOf<W>>(x + part * kPerPart<W>));
      W* const into = cells + (uint32_t(part) ^ part_turn) * kPerPart<W>;
      store_vector(into, load_vector<VectorOf<W>>(into) + turned<W>(more, in_part));
    }
  }
}

// The elements of some blocks in the arithmetic type, zeros up to the end of the last block.
template <class T> HVC_INLINE void widen_blocks(const T* from, int64_t count, Work<T>* x) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_native(x + i, load(from + i, int(std::min<int64_t>(count - i, kLanes))));
}

// Writes the counters of `count` elements, which begin with block `first_block` of the bucket.
template <class T>
void sketch_unit(const T* from, int64_t count, int64_t first_block, int places, const Stream& key, Work<T>* counters) {
  using W = Work<T>;
  const Schedule schedule(key);
  alignas(64) W table[kNormCounters] = {}, widened[kNormCounters + kLanes];
  const int64_t in_layer = int64_t(places) * kSketchBlock, in_group = kNormGroup * kSketchBlock;
  for (int64_t begin = 0; begin < count; begin += kGroupsTogether * in_group) {
    const Drawn drawn(schedule, uint64_t(first_block + begin / kSketchBlock));
    for (int group = 0; group < kGroupsTogether; ++group) {
      BlockSigns<W> signs(drawn.signs[group]);
      for (int layer = 0; layer * in_layer < in_group; ++layer) {
        const int64_t i = begin + group * in_group + layer * in_layer, here = std::min(count - i, in_layer);
        if (here <= 0) break;
        const W* x = widened;
        if constexpr (std::is_same_v<T, W>)
          if (here == in_layer) x = from + i;
        if (x == widened) widen_blocks(from + i, here, widened);
        const int blocks = int(ceil_div(here, kSketchBlock));
        add_layer(table, x, blocks, places, NormTurn{drawn.turns[group][layer]}, signs);
      }
    }
  }
  memcpy(counters, table, size_t(in_layer) * sizeof(W));
}
