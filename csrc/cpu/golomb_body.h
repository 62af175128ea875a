// Decoding in one pass over the memory. Compiled once per instruction set.

constexpr int64_t kTile = 4096;  // elements whose sums stay in the nearest cache

template <class W> HVC_INLINE void fold_section(SectionCursor<W>& cursor, int64_t begin, int64_t end, W* sums) {
  GolombReader reader = cursor.reader;
  const W value = cursor.value;
  for (; reader.position() < end; reader.advance()) sums[reader.position() - begin] += value;
  cursor.reader = reader;
}

// The same, and the places are kept; returns their number.
template <class W>
HVC_INLINE int64_t fold_own(SectionCursor<W>& cursor, int64_t begin, int64_t end, W* sums, int32_t* places) {
  GolombReader reader = cursor.reader;
  const W value = cursor.value;
  int64_t found = 0;
  for (; reader.position() < end; reader.advance()) {
    const auto place = int32_t(reader.position() - begin);
    sums[place] += value;
    places[found++] = place;
  }
  cursor.reader = reader;
  return found;
}

template <bool kResidual, class T>
HVC_INLINE void settle(T* grad, Work<T>* residual, const Work<T>* sums, Work<T> scale, int64_t count) {
  const auto group = [&](int64_t i, int lanes) {
    if (kResidual) store(residual + i, load(grad + i, lanes) + load(residual + i, lanes), lanes);
    store(grad + i, load(sums + i, lanes) * broadcast(scale), lanes);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) group(i, kLanes);
  if (i < count) group(i, rest_of(count - i));
}

template <class T> HVC_INLINE void decode_tile(const SparseDecode<T>& d, std::vector<SectionCursor<Work<T>>>& cursors,
                                               int64_t begin, int64_t end) {
  alignas(64) Work<T> sums[kTile];
  int32_t places[kTile];
  int64_t found = 0;
  memset(sums, 0, size_t(end - begin) * sizeof *sums);
  for (int64_t rank = 0; rank < d.number; ++rank) {
    if (rank == d.own)
      found = fold_own(cursors[size_t(rank)], begin, end, sums, places);
    else
      fold_section(cursors[size_t(rank)], begin, end, sums);
  }
  if (!d.residual) return settle<false>(d.grad + begin, d.residual, sums, d.scale, end - begin);
  settle<true>(d.grad + begin, d.residual + begin, sums, d.scale, end - begin);
  const Work<T> value = cursors[size_t(d.own)].value;
  for (int64_t i = 0; i < found; ++i) d.residual[begin + places[i]] -= value;
}

// Returns the number of malformed ranges.
template <class T> int64_t decode_ranges(const SparseDecode<T>& d, int64_t first, int64_t last) {
  auto cursors = cursors_at<Work<T>>(d.sections, d.number, d.parameter, d.count, first);
  const int64_t length = range_elements(d.parameter);
  int64_t wrong = 0;
  for (int64_t range = first; range < last; ++range) {
    const int64_t end = std::min((range + 1) * length, d.count);
    for (auto& cursor : cursors) cursor.open(d.parameter, d.count, range);
    for (int64_t begin = range * length; begin < end; begin += kTile)
      decode_tile(d, cursors, begin, std::min(begin + kTile, end));
    for (auto& cursor : cursors) wrong += cursor.reader.malformed();
  }
  return wrong;
}
