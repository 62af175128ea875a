// Decoding of values in one pass over the memory. Compiled once per instruction set.

constexpr int64_t kTile = 4096;  // elements whose sums stay in the nearest cache

// What this rank sent in a tile.
template <class W> struct Sent {
  int32_t places[kTile];
  W values[kTile];
  int64_t number;
};

template <ValueForm kForm, bool kOwn, bool kCounts, class W>
HVC_INLINE void fold_range(ValueCursor<W>& cursor, int64_t begin, int64_t end, W* sums, W* senders, Sent<W>& sent) {
  GolombReader reader = cursor.reader;
  const uint8_t* values = cursor.values;
  const ForAll<W> for_all = cursor.for_all;
  int64_t index = cursor.index, found = 0;
  for (; reader.position() < end; reader.advance()) {
    if (__builtin_expect(index == cursor.number, 0)) {
      reader = GolombReader::broken();
      break;
    }
    const W value = value_at<kForm>(values, index++, for_all);
    const auto place = int32_t(reader.position() - begin);
    sums[place] += value;
    if constexpr (kCounts) senders[place] += 1;
    if constexpr (kOwn) sent.places[found] = place, sent.values[found++] = value;
  }
  cursor.reader = reader;
  cursor.index = index;
  if constexpr (kOwn) sent.number = found;
}

template <bool kOwn, bool kCounts, class W>
HVC_INLINE void fold_values(ValueCursor<W>& cursor, int64_t begin, int64_t end, W* sums, W* senders, Sent<W>& sent) {
  switch (cursor.form) {
    case kFullValues:
      return fold_range<kFullValues, kOwn, kCounts>(cursor, begin, end, sums, senders, sent);
    case kHalfValues:
      return fold_range<kHalfValues, kOwn, kCounts>(cursor, begin, end, sums, senders, sent);
    case kBFloat16Values:
      return fold_range<kBFloat16Values, kOwn, kCounts>(cursor, begin, end, sums, senders, sent);
    case kSigns:
      return fold_range<kSigns, kOwn, kCounts>(cursor, begin, end, sums, senders, sent);
    case kCodes2:
      return fold_range<kCodes2, kOwn, kCounts>(cursor, begin, end, sums, senders, sent);
    case kCodes4:
      return fold_range<kCodes4, kOwn, kCounts>(cursor, begin, end, sums, senders, sent);
    case kCodes8:
      return fold_range<kCodes8, kOwn, kCounts>(cursor, begin, end, sums, senders, sent);
  }
}

// Divides sums by how many ranks have sent the element; whole lanes, of which those past the end are not used.
template <class W> HVC_INLINE void divide_tile(W* sums, const W* senders) {
  for (int64_t i = 0; i < kTile; i += kLanes)
    store(sums + i, load(sums + i) / larger(load(senders + i), broadcast(W(1))));
}

// Writes the result, and what is kept as if nothing had been sent.
template <Keeps kKeeps, class T>
HVC_INLINE void settle_tile(const ValueDecode<T>& d, int64_t begin, const Work<T>* sums, int64_t count) {
  using W = Work<T>;
  const auto group = [&](int64_t i, int lanes) {
    const int64_t at = begin + i;
    if constexpr (kKeeps != Keeps::nothing) {
      const Lanes<W> grad = load(d.grad + at, lanes);
      Lanes<W> x = grad + load(d.residual + at, lanes);
      if constexpr (kKeeps == Keeps::momentum) {
        const Lanes<W> momentum = bounded(with_momentum(broadcast(d.factor), load(d.momentum + at, lanes), grad));
        store(d.momentum + at, momentum, lanes);
        x = bounded(x + broadcast(d.factor) * momentum);
      } else if constexpr (kKeeps == Keeps::decayed) {
        x = x * broadcast(d.decay);
      }
      store(d.residual + at, x, lanes);
    }
    store(d.grad + at, load(sums + i, lanes) * broadcast(d.scale), lanes);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) group(i, kLanes);
  if (i < count) group(i, rest_of(count - i));
}

// Takes what was sent out of what is kept. With momentum the values are exact: nothing of x is left.
template <class T> HVC_INLINE void take_out(const ValueDecode<T>& d, int64_t begin, const Sent<Work<T>>& sent) {
  for (int64_t i = 0; i < sent.number; ++i) {
    const int64_t at = begin + sent.places[i];
    if (!d.momentum) {
      d.residual[at] -= d.decay * sent.values[i];
    } else {
      if (d.masking) d.momentum[at] = 0;
      d.residual[at] = d.factor * d.momentum[at];
    }
  }
}

template <bool kCounts, class T> HVC_INLINE void decode_tile(const ValueDecode<T>& d,
                                                             std::vector<ValueCursor<Work<T>>>& cursors, int64_t begin,
                                                             int64_t end) {
  using W = Work<T>;
  alignas(64) W sums[kTile], senders[kCounts ? kTile : 1];
  Sent<W> sent;
  sent.number = 0;
  memset(sums, 0, kCounts ? sizeof sums : size_t(end - begin) * sizeof *sums);
  memset(senders, 0, sizeof senders);
  for (int64_t rank = 0; rank < d.number; ++rank) {
    if (rank == d.own)
      fold_values<true, kCounts>(cursors[size_t(rank)], begin, end, sums, senders, sent);
    else
      fold_values<false, kCounts>(cursors[size_t(rank)], begin, end, sums, senders, sent);
  }
  if constexpr (kCounts) divide_tile(sums, senders);
  if (!d.residual) return settle_tile<Keeps::nothing>(d, begin, sums, end - begin);
  if (d.momentum)
    settle_tile<Keeps::momentum>(d, begin, sums, end - begin);
  else if (d.decay != 1)
    settle_tile<Keeps::decayed>(d, begin, sums, end - begin);
  else
    settle_tile<Keeps::residual>(d, begin, sums, end - begin);
  take_out(d, begin, sent);
}

// Returns the number of malformed ranges.
template <class T> int64_t decode_values(const ValueDecode<T>& d, int64_t first, int64_t last) {
  std::vector<ValueCursor<Work<T>>> cursors;
  for (int64_t i = 0; i < d.number; ++i)
    cursors.push_back(value_cursor<Work<T>>(d.sections[i], d.form, d.parameter, d.count, first));
  const int64_t length = range_elements(d.parameter);
  int64_t wrong = 0;
  for (int64_t range = first; range < last; ++range) {
    const int64_t end = std::min((range + 1) * length, d.count);
    for (auto& cursor : cursors) cursor.open(range);
    for (int64_t begin = range * length; begin < end; begin += kTile)
      if (d.by_senders)
        decode_tile<true>(d, cursors, begin, std::min(begin + kTile, end));
      else
        decode_tile<false>(d, cursors, begin, std::min(begin + kTile, end));
    for (auto& cursor : cursors) wrong += cursor.malformed();
  }
  return wrong;
}
