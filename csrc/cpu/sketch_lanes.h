// A block of 16 elements on its way to the cells of its place: with its signs, and turned. Included by a body, inside
// its namespace, after lanes.h.

template <class W> using VectorOf = typename Native<W>::Vector;
template <class W> using IntsOf = typename Native<W>::Ints;
template <class W> constexpr int kPerPart = kWidth / int(sizeof(W));
template <class W> constexpr int kBlockParts = kSketchBlock / kPerPart<W>;

// Lane i of the result is lane i XOR turn.
template <class W> HVC_INLINE VectorOf<W> turned(VectorOf<W> v, uint32_t turn) {
  IntsOf<W> lane;
  for (int i = 0; i < kPerPart<W>; ++i) lane[i] = i;
  lane ^= Int<W>(turn);
#if defined(__clang__)
  VectorOf<W> out;
  for (int i = 0; i < kPerPart<W>; ++i) out[i] = v[lane[i]];
  return out;
#else
  return __builtin_shuffle(v, lane);
#endif
}

// Part `part` of the block at `from`, turned.
template <class W> HVC_INLINE VectorOf<W> turned_part(const W* from, int part, uint32_t turn) {
  const uint32_t other = uint32_t(part) ^ turn / kPerPart<W>;
  return turned<W>(load_vector<VectorOf<W>>(from + other * kPerPart<W>), turn % kPerPart<W>);
}

template <class W> HVC_INLINE VectorOf<W> with_signs(VectorOf<W> v, uint32_t signs) {
  const VectorOf<W> minus_zero = (VectorOf<W>)(IntsOf<W>{} + ~IntOf<W>::kMagnitude);
  return (VectorOf<W>)((IntsOf<W>)v ^ (IntsOf<W>)blend(passed_of<W>(signs, 0), minus_zero, VectorOf<W>{}));
}

// Adds a block to the cells of its place.
template <class W> HVC_INLINE void add_block(W* cells, const W* x, uint32_t signs, uint32_t turn) {
  alignas(64) W signed_x[kSketchBlock];
  const W* from = signed_x;
  if constexpr (kBlockParts<W> == 1) {
    const VectorOf<W> more = turned<W>(with_signs<W>(load_vector<VectorOf<W>>(x), signs), turn);
    store_vector(cells, load_vector<VectorOf<W>>(cells) + more);
  } else {
    for (int part = 0; part < kBlockParts<W>; ++part) {
      const VectorOf<W> v = load_vector<VectorOf<W>>(x + part * kPerPart<W>);
      store_vector(signed_x + part * kPerPart<W>, with_signs<W>(v, signs >> (part * kPerPart<W>)));
    }
    for (int part = 0; part < kBlockParts<W>; ++part) {
      W* into = cells + part * kPerPart<W>;
      store_vector(into, load_vector<VectorOf<W>>(into) + turned_part(from, part, turn));
    }
  }
}
