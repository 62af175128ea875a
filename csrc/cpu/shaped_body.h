// Noise-shaped merging of signs. Compiled once per instruction set.

#include "shaped_lanes.h"

void merge(uint64_t* into, const uint64_t* other, int64_t ranks, const uint64_t* const* before, uint64_t* const* after,
           int64_t first, int64_t last) {
  with_rows(ranks, [&](auto most, int rows) {
    each_bits(first, last, [&](int64_t word, auto zero) {
      using Bits = decltype(zero);
      Counts<Bits, most> counts;
      counts.load(before, rows, word);
      const Bits mine = load_vector<Bits>(into + word), theirs = load_vector<Bits>(other + word);
      store_vector(into + word, shaped_merge(mine, theirs, counts.row, counts.row, rows, ranks));
      counts.store(after, rows, word);
    });
  });
}

// A sum of counts below `ranks` and of so many bits passes the end once at most.
void fold(const uint64_t* const* parts, int64_t ranks, uint64_t* out, const uint64_t* const* before,
          uint64_t* const* after, int64_t first, int64_t last) {
  with_rows(ranks, [&](auto most, int rows) {
    each_bits(first, last, [&](int64_t word, auto zero) {
      using Bits = decltype(zero);
      Counts<Bits, most> counts;
      counts.load(before, rows, word);
      Bits merged{};
      for (int64_t part = 0; part < ranks; ++part)
        merged |= count_once(counts.row, counts.row, rows, ranks, load_vector<Bits>(parts[part] + word), Bits{});
      store_vector(out + word, merged);
      counts.store(after, rows, word);
    });
  });
}
