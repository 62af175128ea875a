// Sketching by blocks. Compiled once per instruction set.

#include "philox_lanes.h"
#include "sketch_lanes.h"

constexpr int kRun = 32;  // blocks drawn together: their cells, in all rows, fit the first cache

// ---- one vector -------------------------------------------------------------------------------------------

template <class W> HVC_INLINE uint32_t at_least(IntsOf<W> v, Int<W> bound) {
#if HVC_WIDTH == 64
  if constexpr (sizeof(W) == 4)
    return _mm512_cmpge_epi32_mask((__m512i)v, _mm512_set1_epi32(bound));
  else
    return _mm512_cmpge_epi64_mask((__m512i)v, _mm512_set1_epi64(bound));
#else
  return bits_of((IntsOf<W>)(v >= IntsOf<W>{} + bound));
#endif
}

// order_of of rules/sketch.h.
template <class W> HVC_INLINE IntsOf<W> orders(VectorOf<W> v) {
  return v != v ? IntsOf<W>{} + IntOf<W>::kNan : turn_negative((IntsOf<W>)v, IntOf<W>::kMagnitude);
}

// ---- runs of blocks ---------------------------------------------------------------------------------------

// Calls run(block, count) for blocks [first, last), cut where a layer ends; stops where it says false.
template <class Run> HVC_INLINE bool each_run(uint32_t places, int64_t first, int64_t last, const Run& run) {
  while (first < last) {
    const int64_t end = std::min({last, (first / places + 1) * places, first + kRun});
    if (!run(first, int(end - first))) return false;
    first = end;
  }
  return true;
}

// Where the blocks of a run go, in rows [first_row, last_row).
template <class W> class Places {
 public:
  Places(const SketchMap& map, int first_row, int last_row)
      : map_(map), schedule_(map.key), first_row_(first_row), last_row_(last_row) {}

  // Blocks of one layer. Their cells are asked for at once: by the time the bits are drawn, they are near.
  HVC_RULE void draw(int64_t block, int count, const W* table) {
    const int64_t layer = block / map_.places;
    if (layer != layer_) enter(layer);
    for (int row = first_row_; row < last_row_; ++row) {
      const Walk walk = walk_[row];
      uint32_t place = place_of(walk, map_.places, uint64_t(block - layer * map_.places));
      for (int i = 0; i < count; ++i) {
        place_[row][i] = place;
        const W* cells = table + row * sketch_columns(map_) + int64_t(place) * kSketchBlock;
        for (int line = 0; line < int(sizeof(W)) / 4; ++line) __builtin_prefetch(cells + line * (64 / sizeof(W)));
        place += walk.step;
        place = std::min(place, place - map_.places);  // wraps around where it is less
      }
    }
    for (int i = 0; i < count; i += kWordsPerVector) {
      Pairs pairs;
      random_pairs<1>(schedule_, counting_from(uint64_t(block + i)), 0, &pairs);
      store_vector(low_ + i, pairs.even);
      store_vector(high_ + i, pairs.odd);
    }
  }

  HVC_RULE int64_t cells(int row, int i) const {
    return row * sketch_columns(map_) + int64_t(place_[row][i]) * kSketchBlock;
  }
  HVC_RULE BlockBits bits(int i) const { return {low_[i], high_[i]}; }

 private:
  void enter(int64_t layer) {
    layer_ = layer;
    for (int row = first_row_; row < last_row_; ++row) walk_[row] = walk_of(map_, row, uint64_t(layer));
  }

  const SketchMap map_;
  const Schedule schedule_;
  const int first_row_, last_row_;
  int64_t layer_ = -1;
  Walk walk_[kSketchRows];
  uint32_t place_[kSketchRows][kRun];
  alignas(64) uint64_t low_[kRun], high_[kRun];
};

// ---- encode -----------------------------------------------------------------------------------------------

// x of `count` elements from `begin` on, zeros up to a multiple of 32; returns how many are not finite.
template <class T> HVC_INLINE int64_t gather(const SketchEncode<T>& e, int64_t begin, int count, Work<T>* x) {
  using W = Work<T>;
  int64_t finite = 0;
  for (int i = 0; i < count; i += kLanes) {
    const int n = std::min(count - i, kLanes);
    Lanes<W> sum = load(e.grad + begin + i, n);
    if (e.momentum) sum = broadcast(e.factor) * load(e.momentum + begin + i, n) + sum;
    if (e.residual) sum = load(e.residual + begin + i, n) + sum;
    finite += __builtin_popcount(mask_of<Test::below>(magnitude(sum), infinity<W>) & valid_lanes(n));
    store_native(x + i, sum);
  }
  return count - finite;
}

// Adds blocks [first, last) of the bucket to rows [first_row, last_row); returns how many x are not finite.
template <class T> int64_t encode(const SketchEncode<T>& e, int first_row, int last_row, int64_t first, int64_t last) {
  using W = Work<T>;
  Places<W> places(e.map, first_row, last_row);
  alignas(64) W x[kRun * kSketchBlock];
  int64_t nonfinite = 0;
  each_run(e.map.places, first, last, [&](int64_t block, int count) {
    const int64_t begin = block * kSketchBlock - e.offset;
    places.draw(block, count, e.table);
    nonfinite += gather(e, begin, int(std::min<int64_t>(count * kSketchBlock, e.count - begin)), x);
    for (int row = first_row; row < last_row; ++row)
      for (int i = 0; i < count; ++i) {
        const BlockBits bits = places.bits(i);
        add_block(e.table + places.cells(row, i), x + i * kSketchBlock, sign_bits(bits, row), turn_of(bits, row));
      }
    return true;
  });
  return nonfinite;
}

// ---- estimates --------------------------------------------------------------------------------------------

// Bits of the estimates of a block.
template <class W> struct BlockEstimate {
  IntsOf<W> part[kBlockParts<W>];

  HVC_RULE uint32_t magnitude_at_least(Int<W> bound) const {
    uint32_t mask = 0;
    for (int p = 0; p < kBlockParts<W>; ++p)
      mask |= at_least<W>(part[p] & IntOf<W>::kMagnitude, bound) << (p * kPerPart<W>);
    return mask;
  }
  HVC_RULE void put(Int<W>* into) const {
    for (int p = 0; p < kBlockParts<W>; ++p) store_vector(into + p * kPerPart<W>, part[p]);
  }
};

template <int kRows, class W>
HVC_INLINE BlockEstimate<W> estimate_block(const Places<W>& places, const W* table, int i) {
  BlockEstimate<W> estimate;
  const BlockBits bits = places.bits(i);
  for (int p = 0; p < kBlockParts<W>; ++p) {
    IntsOf<W> order[kRows];
    for (int row = 0; row < kRows; ++row) {
      const VectorOf<W> v = turned_part(table + places.cells(row, i), p, turn_of(bits, row));
      order[row] = orders<W>(with_signs<W>(v, sign_bits(bits, row) >> (p * kPerPart<W>)));
    }
    estimate.part[p] = turn_negative(median(order, kRows), IntOf<W>::kMagnitude);
  }
  return estimate;
}

// Calls use(block, estimate, which lanes count) for units [first, last) of the spans, as long as it says true.
template <int kRows, class W, class Use>
HVC_INLINE void each_estimate(const SketchTable<W>& s, Places<W>& places, int64_t first, int64_t last, const Use& use) {
  for (const SketchSpan* span = span_of(s, first); first < last; ++span) {
    const int64_t base = span->start / kSketchBlock - span->units;
    const int64_t end = std::min(last, span->units + span_blocks(*span));
    const bool more = each_run(s.map.places, first + base, end + base, [&](int64_t block, int count) {
      places.draw(block, count, s.table);
      for (int i = 0; i < count; ++i) {
        const int64_t left = span->start + span->count - (block + i) * kSketchBlock;
        const uint32_t valid = left >= kSketchBlock ? 0xffffu : (1u << left) - 1;
        if (!use(block + i, estimate_block<kRows, W>(places, s.table, i), valid)) return false;
      }
      return true;
    });
    if (!more) return;
    first = end;
  }
}

// Magnitudes in every `stride`-th unit; returns how many.
template <int kRows, class W> int64_t sample(const SketchTable<W>& s, int64_t stride, Int<W>* magnitudes) {
  int64_t count = 0;
  Places<W> places(s.map, 0, kRows);
  for (int64_t unit = 0; unit < s.units; unit += stride)
    each_estimate<kRows, W>(s, places, unit, unit + 1, [&](int64_t, const BlockEstimate<W>& e, uint32_t valid) {
      Int<W> bits[kSketchBlock];
      e.put(bits);
      for (int lane = 0; valid >> lane; ++lane) magnitudes[count++] = bits[lane] & IntOf<W>::kMagnitude;
      return true;
    });
  return count;
}

// Counts the next 16 bits, from `shift` on, of the magnitudes that begin with `prefix`.
template <int kRows, class W>
void histogram(const SketchTable<W>& s, Int<W> prefix, int shift, int64_t* bins, int64_t first, int64_t last) {
  Places<W> places(s.map, 0, kRows);
  each_estimate<kRows, W>(s, places, first, last, [&](int64_t, const BlockEstimate<W>& e, uint32_t valid) {
    Int<W> bits[kSketchBlock];
    e.put(bits);
    for (int lane = 0; valid >> lane; ++lane) {
      const Int<W> upper = (bits[lane] & IntOf<W>::kMagnitude) >> shift;
      if (upper >> 16 == prefix) ++bins[upper & 0xffff];
    }
    return true;
  });
}

// All estimates with a magnitude above `bound` and the first `ties` that equal it, until `found` is full.
template <int kRows, class W>
void collect(const SketchTable<W>& s, Int<W> bound, int64_t ties, Candidates<W>& found, int64_t first, int64_t last) {
  int64_t count = 0;
  Places<W> places(s.map, 0, kRows);
  each_estimate<kRows, W>(s, places, first, last, [&](int64_t block, const BlockEstimate<W>& e, uint32_t valid) {
    uint32_t lanes = e.magnitude_at_least(bound) & valid;
    if (__builtin_expect(lanes == 0, 1)) return true;
    found.full = count + kSketchBlock > found.capacity;
    if (found.full) return false;
    Int<W> bits[kSketchBlock];
    e.put(bits);
    for (; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if ((bits[lane] & IntOf<W>::kMagnitude) == bound && --ties < 0) continue;
      found.positions[count] = uint32_t(block * kSketchBlock + lane);
      found.bits[count++] = bits[lane];
    }
    return true;
  });
  found.count = count;
}
