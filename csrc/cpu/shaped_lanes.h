// Counts of rules/shaped.h, many at once. Included by the bodies of kernels that count.

// Vectors where whole ones fit, words at the end. Few rows are a constant of the compiler, and stay in registers.
constexpr int kFewRows = 4;

template <class Use> HVC_INLINE void each_bits(int64_t first, int64_t last, const Use& use) {
  int64_t word = first;
  for (; word + kWordsPerVector <= last; word += kWordsPerVector) use(word, Words{});
  for (; word < last; ++word) use(word, uint64_t{});
}

// Counts of some lanes, in registers.
template <class Bits, int kRows> struct Counts {
  Bits row[kRows];

  void load(const uint64_t* const* from, int rows, int64_t word) {
    for (int l = 0; l < rows; ++l) row[l] = load_vector<Bits>(from[l] + word);
  }
  void store(uint64_t* const* into, int rows, int64_t word) const {
    for (int l = 0; l < rows; ++l) store_vector(into[l] + word, row[l]);
  }
};

// Calls `body` with a constant of the number of rows, or of the most; `rows` is the number itself.
template <class Body> HVC_INLINE void with_rows(int64_t ranks, const Body& body) {
  const int rows = count_rows(ranks);
  if (rows == 1) return body(std::integral_constant<int, 1>{}, 1);
  if (rows == 2) return body(std::integral_constant<int, 2>{}, 2);
  if (rows <= kFewRows) return body(std::integral_constant<int, kFewRows>{}, rows);
  body(std::integral_constant<int, kMaxRows>{}, rows);
}
