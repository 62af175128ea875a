// Selection within chunks. Compiled once per instruction set.

// x of a chunk, and its magnitudes as keys, 0 for NaN; absent lanes past the end are zeros. Returns how many are not
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

// Calls use(i) for the elements of a chunk whose keys reach a bound, in order.
template <class W, class Use> HVC_INLINE void each_reaching(const W* x, int64_t size, Key<W> bound, const Use& use) {
  for (int64_t i = 0; i < size; i += kLanes)
    for (uint32_t mask = mask_of<Test::greater_equal>(magnitude(load(x + i)), bit_cast<W>(bound)); mask;
         mask &= mask - 1)
      use(i + __builtin_ctz(mask));
}

// The keys of a chunk that the cut may still be among: bounds rise once k keys have reached one. It is called, not
// inlined: the rule that calls it is of no instruction set.
template <class W> struct Among {
  using K = Key<W>;
  const W* x;
  const K* keys;
  int64_t size, k;
  K* few;  // keys behind the first time that these are much fewer

  int64_t operator()(K bound) {
    const int64_t number = reaching(keys, size, bound);
    if (number < k || 8 * number > size || keys == few) return number;
    int64_t left = 0;
    each_reaching(x, size, bound, [&](int64_t i) __attribute__((always_inline)) { few[left++] = keys[i]; });
    keys = few;
    size = number;
    return number;
  }
};

// Writes what is kept of a chunk, in order; returns how much.
template <class W> HVC_INLINE int32_t keep_of_chunk(const W* x, const Key<W>* keys, int64_t size, Cut<Key<W>> cut,
                                                    int64_t begin, int32_t* positions, W* values) {
  int32_t found = 0;
  const Key<W> bound = cut.ties > 0 ? cut.key : Key<W>(cut.key + 1);
  each_reaching(x, size, bound, [&](int64_t i) __attribute__((always_inline)) {
    if (keys[i] == cut.key && cut.ties-- <= 0) return;
    positions[found] = int32_t(begin + i);
    values[found++] = x[i];
  });
  return found;
}

// Writes what is kept of some chunks, each at its place; returns how many elements are not finite.
template <class T> int64_t select_chunks(const Input<T>& in, const ChunkShape& s, int32_t* positions, Work<T>* values,
                                         int32_t* kept, int64_t first, int64_t last) {
  using W = Work<T>;
  using K = Key<W>;
  alignas(64) W x[kMostChunk];
  alignas(64) K keys[kMostChunk], few[kMostChunk / 8];
  int64_t bad = 0;
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * s.chunk, size = chunk_size(s, index);
    K largest;
    bad += load_chunk(in, begin, size, x, keys, largest);
    const int64_t k = kept_of_chunk(s, index);
    const Cut<K> cut = cut_of_chunk(largest, k, Among<W>{x, keys, size, k, few});
    kept[index] = keep_of_chunk(x, keys, size, cut, begin, positions + index * s.k, values + index * s.k);
  }
  return bad;
}
