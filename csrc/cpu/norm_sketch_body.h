// A unit of blocks, added to its counters. Compiled once per instruction set.

#include "philox_lanes.h"
#include "sketch_lanes.h"

constexpr int kDrawnTogether = 2 * kWordsPerPairs;  // blocks: four for each counter of the generator

// The elements of some blocks in the arithmetic type, zeros up to the end of the last block.
template <class T> HVC_INLINE void widen_blocks(const T* from, int64_t count, Work<T>* x) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_native(x + i, load(from + i, int(std::min<int64_t>(count - i, kLanes))));
}

// Writes the counters of `count` elements, which begin with block `block` of the bucket.
template <class T>
void sketch_unit(const T* from, int64_t count, int64_t block, int places, const Stream& key, Work<T>* counters) {
  using W = Work<T>;
  const Schedule schedule(key);
  const int64_t blocks = ceil_div(count, kSketchBlock);
  const uint32_t last_place = uint32_t(places) - 1;
  alignas(64) W table[kNormCounters] = {}, x[kDrawnTogether * kSketchBlock + kLanes];
  alignas(64) uint32_t words[kDrawnTogether];
  uint32_t shift = 0;
  for (int64_t first = 0; first < blocks; first += kDrawnTogether) {
    Pairs pairs;
    Words low, high;
    random_pairs<1>(schedule, counting_from(uint64_t(block + first) / kNormDrawn), 0, &pairs);
    interleave(pairs, low, high);
    store_vector(words, low);
    store_vector(words + kDrawnTogether / 2, high);
    const int here = int(std::min<int64_t>(blocks - first, kDrawnTogether));
    const int64_t begin = first * kSketchBlock;
    const W* values = x;
    if constexpr (std::is_same_v<T, W>) {
      if (begin + here * kSketchBlock <= count) values = from + begin;
    }
    if (values == x) widen_blocks(from + begin, std::min<int64_t>(count - begin, here * kSketchBlock), x);
    for (int i = 0; i < here; ++i) {
      const NormBits bits{words[i]};
      const uint32_t in_layer = uint32_t(first + i) & last_place;
      if (in_layer == 0) shift = bits.shift(places);
      add_block(table + (in_layer ^ shift) * kSketchBlock, values + i * kSketchBlock, bits.signs(), bits.turn());
    }
  }
  memcpy(counters, table, size_t(places * kSketchBlock) * sizeof(W));
}
