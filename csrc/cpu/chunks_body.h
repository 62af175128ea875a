// Selection within chunks. Compiled once per instruction set.

// x of a chunk, and its magnitudes as keys, 0 for NaN; absent lanes behind the end are zeros. Returns how many are not
// finite.
template <class T> HVC_INLINE int64_t load_chunk(const Input<T>& in, int64_t begin, int64_t size, Work<T>* x,
                                                 Key<Work<T>>* keys, Key<Work<T>>& largest) {
  using W = Work<T>;
  using K = Key<W>;
  int64_t bad = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, size - i));
    Lanes<W> lanes = load(in.grad + begin + i, count);
    if (in.residual) lanes = lanes + load(in.residual + begin + i, count);
    bad += __builtin_popcount(~mask_of<Test::below>(magnitude(lanes), infinity<W>) & valid_lanes(count));
    store(x + i, lanes);
  }
  constexpr K kInfinite = K(kInfinityBits<W>);
  K most = 0;
  for (int64_t i = 0; i < size; ++i) {
    const K key = key_of(x[i]), sure = key > kInfinite ? 0 : key;
    keys[i] = sure;
    most = most < sure ? sure : most;
  }
  largest = most;
  return bad;
}

// Counts in numbers as wide as the keys, so that vectors do it.
template <class K> HVC_INLINE int64_t reaching(const K* keys, int64_t size, K bound) {
  K number = 0;
  for (int64_t i = 0; i < size; ++i) number += keys[i] >= bound;
  return int64_t(number);
}

// Writes what is kept of a chunk, in order; returns how much.
template <class W> HVC_INLINE int32_t keep_of_chunk(const W* x, const Key<W>* keys, int64_t size, Cut<Key<W>> cut,
                                                    int64_t begin, int32_t* positions, W* values) {
  int32_t found = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t end = std::min<int64_t>(i + kLanes, size);
    bool any = false;
    for (int64_t j = i; j < end; ++j) any |= keys[j] >= cut.key;
    if (!any) continue;
    for (int64_t j = i; j < end; ++j) {
      if (keys[j] < cut.key || (keys[j] == cut.key && cut.ties-- <= 0)) continue;
      positions[found] = int32_t(begin + j);
      values[found++] = x[j];
    }
  }
  return found;
}

// Writes what is kept of some chunks, each at its place; returns how many elements are not finite.
template <class T> int64_t select_chunks(const Input<T>& in, const ChunkShape& s, int32_t* positions, Work<T>* values,
                                         int32_t* kept, int64_t first, int64_t last) {
  using W = Work<T>;
  using K = Key<W>;
  alignas(64) W x[kMostChunk];
  alignas(64) K keys[kMostChunk];
  int64_t bad = 0;
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * s.chunk, size = chunk_size(s, index);
    K largest;
    bad += load_chunk(in, begin, size, x, keys, largest);
    const auto at_least = [&](K bound) { return reaching(keys, size, bound); };
    const Cut<K> cut = cut_of_chunk(largest, kept_of_chunk(s, index), at_least);
    kept[index] = keep_of_chunk(x, keys, size, cut, begin, positions + index * s.k, values + index * s.k);
  }
  return bad;
}
