// Products with factors of low rank, 32 columns at a time. Compiled once per instruction set; see foreach_isa.h.

// X is read once for this many components; their sums stay in registers.
constexpr int kComponents = 4;

// Several rows are several streams, which the processor foresees late: this takes a fifth off the time.
constexpr int64_t kAhead = 256;
template <class P> HVC_INLINE void fetch_ahead(const P* from, int64_t ahead) {
  __builtin_prefetch(from + ahead);
  __builtin_prefetch(from + ahead + kLanes / 2);
}

template <bool kResidual, class T>
HVC_INLINE Lanes<Work<T>> element(const Matrix<T>& x, int64_t row, int64_t column, int count, int64_t ahead) {
  const int64_t at = row * x.columns + column;
  fetch_ahead(x.grad + at, ahead);
  if (kResidual) fetch_ahead(x.residual + at, ahead);
  const Lanes<Work<T>> grad = load(x.grad + at, count);
  return kResidual ? grad + load(x.residual + at, count) : grad;
}

// ---- X right ------------------------------------------------------------------------------------------------

template <bool kResidual, int kRows, int kRank, class T>
HVC_INLINE int64_t left_of_rows(const LeftOf<T>& o, int64_t row, int64_t line) {
  using W = Work<T>;
  const Matrix<T>& x = o.x;
  Lanes<W> sums[kRows][kRank];
  for (auto& of_row : sums)
    for (auto& sum : of_row) sum = broadcast(W(0));
  int64_t nonfinite = 0;
  const auto add = [&](int64_t j, int count) __attribute__((always_inline)) {
    Lanes<W> right[kRank];
    for (int c = 0; c < kRank; ++c) right[c] = load(o.right + (line + c) * x.columns + j, count);
    for (int k = 0; k < kRows; ++k) {
      const Lanes<W> value = element<kResidual>(x, row + k, j, count, kAhead);
      nonfinite += __builtin_popcount(~can_be_kept(value) & valid_lanes(count));
      for (int c = 0; c < kRank; ++c) sums[k][c] = sums[k][c] + value * right[c];
    }
  };
  int64_t j = 0;
  for (; j + kLanes <= x.columns; j += kLanes) add(j, kLanes);
  if (j < x.columns) add(j, rest_of(x.columns - j));
  for (int k = 0; k < kRows; ++k)
    for (int c = 0; c < kRank; ++c) o.left[(line + c) * x.rows + row + k] = combine(sums[k][c]);
  return line == 0 ? nonfinite : 0;
}

template <bool kResidual, class T> int64_t left_of_two_rows(const LeftOf<T>& o, int64_t row) {
  int64_t nonfinite = 0, line = 0;
  for (; line + kComponents <= o.x.rank; line += kComponents)
    nonfinite += left_of_rows<kResidual, 2, kComponents>(o, row, line);
  const int64_t rest = o.x.rank - line;
  if (rest == 3) return nonfinite + left_of_rows<kResidual, 2, 3>(o, row, line);
  if (rest == 2) return nonfinite + left_of_rows<kResidual, 2, 2>(o, row, line);
  if (rest == 1) return nonfinite + left_of_rows<kResidual, 2, 1>(o, row, line);
  return nonfinite;
}

// One row of many is no place to save passes, and each form takes the compiler a second.
template <bool kResidual, class T> int64_t left_of_last_row(const LeftOf<T>& o, int64_t row) {
  int64_t nonfinite = 0;
  for (int64_t line = 0; line < o.x.rank; ++line) nonfinite += left_of_rows<kResidual, 1, 1>(o, row, line);
  return nonfinite;
}

template <bool kResidual, class T> int64_t left_rows(const LeftOf<T>& o, int64_t first, int64_t last) {
  int64_t nonfinite = 0, row = first;
  for (; row + 2 <= last; row += 2) nonfinite += left_of_two_rows<kResidual>(o, row);
  return row < last ? nonfinite + left_of_last_row<kResidual>(o, row) : nonfinite;
}

template <class T> int64_t lowrank_left(const LeftOf<T>& o, int64_t first, int64_t last) {
  return o.x.residual ? left_rows<true>(o, first, last) : left_rows<false>(o, first, last);
}

// ---- X^T left -----------------------------------------------------------------------------------------------

// Adds some rows' products to the sums of a tile's columns.
template <bool kResidual, int kRows, class T>
HVC_INLINE void right_of_rows(const RightOf<T>& o, int64_t row, int64_t begin, int64_t end, Work<T>* sums) {
  using W = Work<T>;
  const int64_t ahead = std::max(kAhead, kRows * o.x.columns);  // the tile's next rows: what is between is not needed
  const auto add = [&](int64_t j, int count) __attribute__((always_inline)) {
    Lanes<W> values[kRows];
    for (int k = 0; k < kRows; ++k) values[k] = element<kResidual>(o.x, row + k, j, count, ahead);
    for (int64_t c = 0; c < o.x.rank; ++c) {
      W* sum = sums + c * kTile + (j - begin);
      const W* left = o.left + c * o.x.rows + row;
      Lanes<W> total = load(sum);
      for (int k = 0; k < kRows; ++k) total = total + values[k] * broadcast(left[k]);
      store(sum, total);
    }
  };
  int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes) add(j, kLanes);
  if (j < end) add(j, rest_of(end - j));
}

template <bool kResidual, class T> void right_tile(const RightOf<T>& o, int64_t begin, int64_t end, Work<T>* sums) {
  using W = Work<T>;
  constexpr int kRows = 4;
  for (int64_t block = 0; block < o.x.rows; block += kRowBlock) {
    const int64_t stop = std::min(block + kRowBlock, o.x.rows);
    std::fill(sums, sums + o.x.rank * kTile, W(0));
    int64_t row = block;
    for (; row + kRows <= stop; row += kRows) right_of_rows<kResidual, kRows>(o, row, begin, end, sums);
    for (; row < stop; ++row) right_of_rows<kResidual, 1>(o, row, begin, end, sums);
    for (int64_t c = 0; c < o.x.rank; ++c) {
      W* right = o.right + c * o.x.columns + begin;
      const W* own = sums + c * kTile;
      for (int64_t j = 0; j < end - begin; ++j) right[j] = block == 0 ? own[j] : right[j] + own[j];
    }
  }
}

template <class T> void lowrank_right(const RightOf<T>& o, int64_t first, int64_t last) {
  std::vector<Work<T>> sums(size_t(o.x.rank * kTile));
  for (int64_t tile = first; tile < last; ++tile) {
    const int64_t begin = tile * o.tile, end = std::min(begin + o.tile, o.x.columns);
    if (o.x.residual)
      right_tile<true>(o, begin, end, sums.data());
    else
      right_tile<false>(o, begin, end, sums.data());
  }
}

// ---- left^T right ---------------------------------------------------------------------------------------------

template <bool kResidual, int kRows, class T> HVC_INLINE void decode_rows(const Product<T>& o, int64_t row) {
  using W = Work<T>;
  constexpr bool kNarrow = std::is_same<T, Half>::value;
  const auto decode = [&](int64_t j, int count) __attribute__((always_inline)) {
    Lanes<W> sums[kRows], right = load(o.right + j, count);
    for (int k = 0; k < kRows; ++k) sums[k] = right * broadcast(o.left[row + k]);
    for (int64_t c = 1; c < o.rank; ++c) {
      right = load(o.right + c * o.columns + j, count);
      const W* left = o.left + c * o.rows + row;
      for (int k = 0; k < kRows; ++k) sums[k] = sums[k] + right * broadcast(left[k]);
    }
    for (int k = 0; k < kRows; ++k) {
      T* grad = o.grad + (row + k) * o.columns + j;
      if constexpr (kNarrow) sums[k] = limited(sums[k], most_sent<T>(o.scale));
      if constexpr (kResidual) {
        W* residual = o.residual + (row + k) * o.columns + j;
        const Lanes<W> left = load(grad, count) + load(residual, count) - sums[k];
        store(residual, limited(left, most_left<W>), count);
      }
      store(grad, sums[k] * broadcast(W(o.scale)), count);
    }
  };
  int64_t j = 0;
  for (; j + kLanes <= o.columns; j += kLanes) decode(j, kLanes);
  if (j < o.columns) decode(j, rest_of(o.columns - j));
}

template <bool kResidual, class T> void decode_all(const Product<T>& o, int64_t first, int64_t last) {
  int64_t row = first;
  for (; row + 2 <= last; row += 2) decode_rows<kResidual, 2>(o, row);
  if (row < last) decode_rows<kResidual, 1>(o, row);
}

template <class T> void lowrank_decode(const Product<T>& o, int64_t first, int64_t last) {
  if (o.residual)
    decode_all<true>(o, first, last);
  else
    decode_all<false>(o, first, last);
}

// ---- lines that are orthonormal ---------------------------------------------------------------------------------

template <class W> HVC_INLINE Lanes<double> wide(const W* from, int count) { return widen<double>(load(from, count)); }

template <class W> double dot(const W* a, const W* b, int64_t count) {
  double total = 0;
  for (int64_t block = 0; block < count; block += kBlock) {
    const int64_t end = std::min(block + kBlock, count);
    Lanes<double> sums = broadcast(0.0);
    for (int64_t i = block; i < end; i += kLanes) {
      const int lanes = int(std::min<int64_t>(kLanes, end - i));
      sums = sums + wide(a + i, lanes) * wide(b + i, lanes);
    }
    total += combine(sums);
  }
  return total;
}

// line = line * scale - share * other, rounded once.
template <class W> void take_out(W* line, double scale, const W* other, double share, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int lanes = int(std::min<int64_t>(kLanes, count - i));
    Lanes<double> value = wide(line + i, lanes) * broadcast(scale);
    if (other) value = value - wide(other + i, lanes) * broadcast(share);
    store(line + i, value, lanes);
  }
}

template <class W> double scale_of(const W* line, int64_t count) {
  MagnitudeBits<W> largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(line[i]));
  return unit_scale(magnitude_of(largest));
}

template <class W> void orthonormalise(W* lines, int64_t count, int64_t rank) {
  for (int64_t c = 0; c < rank; ++c) {
    W* line = lines + c * count;
    const double scale = scale_of(line, count);
    if (scale == 0) {
      std::fill(line, line + count, W(0));
      continue;
    }
    take_out<W>(line, scale, nullptr, 0, count);
    const double before = dot(line, line, count);
    for (int64_t i = 0; i < 2 * c; ++i) {
      const W* other = lines + i % c * count;
      take_out(line, 1, other, dot(other, line, count), count);
    }
    const double factor = normalising<W>(before, dot(line, line, count));
    if (factor == 0)
      std::fill(line, line + count, W(0));
    else
      take_out<W>(line, factor, nullptr, 0, count);
  }
}

template <class W>
void start_lines(const W* kept, int64_t columns, int64_t rank, const Stream& key, int64_t offset, W* right) {
  for (int64_t c = 0; c < rank; ++c) {
    const int64_t begin = c * columns;
    const double scale = scale_of(kept + begin, columns);
    for (int64_t i = begin; i < begin + columns; ++i)
      right[i] = scale == 0 ? W(uniform(key, offset + i)) : W(double(kept[i]) * scale);
  }
}
