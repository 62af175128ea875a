// The largest elements of every chunk of a tensor: a threshold is found bit by bit among the magnitudes of a chunk.
//
//   chunk   so many consecutive elements, 4,096 at most; the last one may be shorter
//   kept    of a chunk the k largest |x|, the lower position first among equals, never a zero or a NaN; of a shorter
//           last one as many as are said for it
#pragma once
#include "rules/select.h"

namespace hvc {

constexpr int kMostChunk = 4096;

struct ChunkShape {
  int64_t count, chunk, k, last;
};

HVC_RULE int64_t number_of_chunks(const ChunkShape& s) { return ceil_div(s.count, s.chunk); }
HVC_RULE int64_t chunk_size(const ChunkShape& s, int64_t index) {
  const int64_t left = s.count - index * s.chunk;
  return left < s.chunk ? left : s.chunk;
}
HVC_RULE int64_t kept_of_chunk(const ChunkShape& s, int64_t index) {
  return chunk_size(s, index) < s.chunk ? s.last : s.k;
}

// Where the cut is: keys above it are kept, and the first `ties` of those that equal it.
// `at_least(key)` says how many keys reach one; none is above `largest`.
template <class K, class Reach> HVC_RULE Cut<K> cut_of_chunk(K largest, int64_t k, Reach at_least) {
  K key = 0;
  for (K bit = K(1) << (8 * sizeof(K) - 2); bit != 0; bit >>= 1) {
    const K trial = key | bit;
    if (trial > largest) continue;
    const int64_t number = at_least(trial);
    if (number >= k) key = trial;
    if (number == k) return {K(trial - 1), 0};
  }
  return key == 0 ? Cut<K>{0, 0} : Cut<K>{key, k - at_least(K(key + 1))};
}

}  // namespace hvc
