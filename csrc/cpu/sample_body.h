// Offering and decoding samples in one pass over the memory. Compiled once per instruction set.

constexpr int64_t kRunOfBlocks = 64;  // whose elements are still in the cache when the chosen ones are taken

// The chosen elements of some blocks in order, and the sizes of the blocks.
struct Chosen {
  int64_t places[kRunOfBlocks], sizes[kRunOfBlocks];
  int64_t number, begin, end;  // how many blocks, and all their elements
};

// The next blocks, up to `last`.
class Walker {
 public:
  Walker(const Sampling& s, int64_t first, int64_t last)
      : s_(s), index_(first), last_(last), blocks_(blocks_from(s.count, s.k, first)) {}

  bool next(Chosen& chosen) {
    if (index_ == last_) return false;
    const int64_t number = std::min(kRunOfBlocks, last_ - index_);
    chosen.number = number;
    chosen.begin = blocks_.begin;
    draw(s_.first + index_, number);
    for (int64_t i = 0; i < number; ++i, next_block(blocks_)) {
      chosen.sizes[i] = blocks_.size;
      chosen.places[i] = blocks_.begin + chosen_of(draws_[i + skip_], blocks_.size);
    }
    chosen.end = blocks_.begin;
    index_ += number;
    return true;
  }

 private:
  void draw(int64_t from, int64_t number) {
    const int64_t group = from / kDrawsPerSampleGroup;
    skip_ = from % kDrawsPerSampleGroup;
    for (int64_t i = 0; kDrawsPerSampleGroup * i < number + skip_; ++i) {
      const Counter r = sample_draws(s_.key, uint64_t(group + i));
      memcpy(draws_ + kDrawsPerSampleGroup * i, &r, sizeof r);
    }
  }

  const Sampling& s_;
  int64_t index_, last_;
  DrawnBlocks blocks_;
  int64_t skip_ = 0;
  uint32_t draws_[kRunOfBlocks + 2 * kDrawsPerSampleGroup];
};

// Calls group(begin, count) for all elements of the chosen blocks.
template <class Group> HVC_INLINE void each_element(const Chosen& chosen, const Group& group) {
  int64_t i = chosen.begin;
  for (; i + kLanes <= chosen.end; i += kLanes) group(i, kLanes);
  if (i < chosen.end) group(i, rest_of(chosen.end - i));
}

// Returns how many elements are not finite.
template <class T> int64_t offer_sample(const Sampling& s, const T* grad, const Work<T>* residual, Work<T>* values,
                                        int64_t first, int64_t last) {
  using W = Work<T>;
  Walker walker(s, first, last);
  Chosen chosen;
  int64_t nonfinite = 0;
  for (W* into = values + first; walker.next(chosen); into += chosen.number) {
    each_element(chosen, [&](int64_t i, int count) {
      Lanes<W> x = load(grad + i, count);
      if (residual) x = x + load(residual + i, count);
      nonfinite += __builtin_popcount(~mask_of<Test::below>(magnitude(x), infinity<W>) & valid_lanes(count));
    });
    for (int64_t i = 0; i < chosen.number; ++i) {
      const int64_t place = chosen.places[i];
      into[i] = residual ? W(to_work(grad[place]) + residual[place]) : to_work(grad[place]);
    }
  }
  return nonfinite;
}

// Zeros and a few values, written around the cache: they are put together piece by piece, and no line of `out` is read.
template <class T> class AroundCache {
 public:
  explicit AroundCache(T* out) : out_(out) {}
  ~AroundCache() { stream_fence(); }

  // Writes elements [begin, end), where the value of chosen place i is value(i).
  template <class Value> void write(const Chosen& chosen, const Value& value) {
    int64_t i = 0;
    for (int64_t at = chosen.begin; at < chosen.end;) {
      const int lead = to_cache_line(out_ + at, chosen.end - at);
      const int64_t stop = lead ? at + lead : std::min(at + kPiece, chosen.end), start = i;
      for (; i < chosen.number && chosen.places[i] < stop; ++i) piece_[chosen.places[i] - at] = value(i);
      copy(out_ + at, stop - at);
      for (int64_t j = start; j < i; ++j) piece_[chosen.places[j] - at] = T{};
      at = stop;
    }
  }

 private:
  static constexpr int64_t kPiece = 4096;

  void copy(T* into, int64_t count) const {
    const int64_t lines = count * int64_t(sizeof(T)) / 64 * 64, rest = lines / int64_t(sizeof(T));
    if (reinterpret_cast<uintptr_t>(into) % 64) return copy_rest(into, 0, count);
    const char* from = reinterpret_cast<const char*>(piece_);
    for (int64_t at = 0; at < lines; at += kWidth)
      stream_vector(reinterpret_cast<char*>(into) + at, load_vector<Words>(from + at));
    copy_rest(into, rest, count);
  }
  void copy_rest(T* into, int64_t first, int64_t last) const {
    memcpy(static_cast<void*>(into + first), piece_ + first, size_t(last - first) * sizeof(T));
  }

  T* out_;
  alignas(64) T piece_[kPiece] = {};
};

// What element i of the chosen ones becomes; `values` are theirs.
template <class T>
HVC_INLINE T sample_result(const Chosen& chosen, const Work<T>* values, Work<T> scale, bool weighted, int64_t i) {
  using W = Work<T>;
  const W value = weighted ? W(values[i] * W(chosen.sizes[i])) : values[i];
  return from_work<T>(W(value * scale));
}

// Only here is a piece of zeros made and a fence set: smaller tensors, and those with a residual, need neither.
template <class T> void decode_around_cache(const Sampling& s, const Work<T>* values, Work<T> scale, bool weighted,
                                            T* grad, int64_t first, int64_t last) {
  Walker walker(s, first, last);
  Chosen chosen;
  AroundCache<T> around(grad);
  for (const Work<T>* from = values + first; walker.next(chosen); from += chosen.number)
    around.write(chosen, [&](int64_t i) { return sample_result<T>(chosen, from, scale, weighted, i); });
}

template <class T> void decode_sample(const Sampling& s, const Work<T>* values, Work<T> scale, bool weighted, T* grad,
                                      Work<T>* residual, bool streamed, int64_t first, int64_t last) {
  if (streamed && !residual) return decode_around_cache(s, values, scale, weighted, grad, first, last);
  Walker walker(s, first, last);
  Chosen chosen;
  for (const Work<T>* from = values + first; walker.next(chosen); from += chosen.number) {
    if (residual)
      each_element(chosen, [&](int64_t i, int count) {
        store(residual + i, load(grad + i, count) + load(residual + i, count), count);
      });
    memset(static_cast<void*>(grad + chosen.begin), 0, size_t(chosen.end - chosen.begin) * sizeof(T));
    for (int64_t i = 0; i < chosen.number; ++i) {
      grad[chosen.places[i]] = sample_result<T>(chosen, from, scale, weighted, i);
      if (residual) residual[chosen.places[i]] = 0;
    }
  }
}

// ---- units of several elements ----------------------------------------------------------------------------

// Calls use(the group, the elements of it, those of the chosen unit, the unit's first value) for some groups.
struct Elements {
  int64_t begin, end;
};
HVC_INLINE int64_t end_of_units(const Sampling& s, int64_t units) { return std::min(units * s.block, s.count); }
template <class W, class Use>
HVC_INLINE void each_unit(const Sampling& s, int64_t first, int64_t last, W* values, const Use& use) {
  DrawnBlocks group = blocks_from(units_of(s), s.k, first);
  for (int64_t i = first; i < last; ++i, next_block(group)) {
    const int64_t number = s.first + i;
    const Counter r = sample_draws(s.key, uint64_t(number / kDrawsPerSampleGroup));
    uint32_t draws[kDrawsPerSampleGroup];
    memcpy(draws, &r, sizeof draws);
    const int64_t unit = group.begin + chosen_of(draws[number % kDrawsPerSampleGroup], group.size);
    const Elements all{group.begin * s.block, end_of_units(s, group.begin + group.size)};
    use(group.size, all, Elements{unit * s.block, end_of_units(s, unit + 1)}, values + i * s.block);
  }
}

template <class Group> HVC_INLINE void each_of(const Elements& elements, const Group& group) {
  int64_t i = elements.begin;
  for (; i + kLanes <= elements.end; i += kLanes) group(i, kLanes);
  if (i < elements.end) group(i, rest_of(elements.end - i));
}

// Returns how many elements are not finite.
template <class T> int64_t offer_blocks(const Sampling& s, const T* grad, const Work<T>* residual, Work<T>* values,
                                        int64_t first, int64_t last) {
  using W = Work<T>;
  int64_t nonfinite = 0;
  const auto at = [&](int64_t i, int count) {
    const Lanes<W> x = load(grad + i, count);
    return residual ? x + load(residual + i, count) : x;
  };
  each_unit(s, first, last, values, [&](int64_t, const Elements& all, const Elements& chosen, W* into) {
    each_of(all, [&](int64_t i, int count) {
      nonfinite += __builtin_popcount(~mask_of<Test::below>(magnitude(at(i, count)), infinity<W>) & valid_lanes(count));
    });
    each_of(chosen, [&](int64_t i, int count) { store(into + (i - chosen.begin), at(i, count), count); });
    const int64_t size = chosen.end - chosen.begin;
    memset(into + size, 0, size_t(s.block - size) * sizeof(W));
  });
  return nonfinite;
}

template <class T> void decode_blocks(const Sampling& s, const Work<T>* values, Work<T> scale, bool weighted, T* grad,
                                      Work<T>* residual, bool, int64_t first, int64_t last) {
  using W = Work<T>;
  each_unit(s, first, last, values, [&](int64_t units, const Elements& all, const Elements& chosen, const W* from) {
    if (residual)
      each_of(all, [&](int64_t i, int count) {
        store(residual + i, load(grad + i, count) + load(residual + i, count), count);
      });
    memset(static_cast<void*>(grad + all.begin), 0, size_t(all.end - all.begin) * sizeof(T));
    each_of(chosen, [&](int64_t i, int count) {
      Lanes<W> value = load(from + (i - chosen.begin), count);
      if (weighted) value = value * broadcast(W(units));
      store(grad + i, value * broadcast(scale), count);
    });
    if (residual) memset(residual + chosen.begin, 0, size_t(chosen.end - chosen.begin) * sizeof(W));
  });
}
