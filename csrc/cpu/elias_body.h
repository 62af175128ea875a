// QSGD with Elias codes. Compiled once per instruction set.

#include "qsgd_lanes.h"

// ---- encode -----------------------------------------------------------------------------------------------

constexpr int kGroup = 64;  // a block is whole groups

// Bit i says whether element i of a group is not 0.
HVC_INLINE uint64_t not_zero(const int8_t* codes) {
#if HVC_WIDTH == 64
  const auto v = load_vector<__m512i>(codes);
  return _mm512_test_epi8_mask(v, v);
#elif HVC_WIDTH == 32
  uint64_t zero = 0;
  for (int i = 0; i < 2; ++i) {
    const __m256i equal = _mm256_cmpeq_epi8(load_vector<__m256i>(codes + 32 * i), __m256i{});
    zero |= uint64_t(uint32_t(_mm256_movemask_epi8(equal))) << (32 * i);
  }
  return ~zero;
#else
  uint64_t found = 0;
  for (int i = 0; i < kGroup; ++i) found |= uint64_t(codes[i] != 0) << i;
  return found;
#endif
}

// Bits, lowest first, a whole word stored each time: there is room for one behind them.
struct WordWriter {
  uint8_t* at;
  uint64_t pending = 0;
  int filled = 0;

  // At most 56 bits.
  HVC_RULE void put(uint64_t bits, int length) {
    pending |= bits << filled;
    memcpy(at, &pending, sizeof pending);
    filled += length;
    at += filled / 8;
    pending >>= filled & ~7;
    filled &= 7;
  }
};

// A code for each level that is not 0, and the elements that were passed since the last one.
class LevelWriter {
 public:
  explicit LevelWriter(int32_t levels) {
    for (int k = 0; k < kGaps; ++k) gaps_[k] = gamma_of(uint32_t(k + 1));
    for (int32_t k = 1; k <= levels; ++k) {
      const Gamma size = gamma_of(uint32_t(k));
      levels_[k] = {size.bits << 1, size.length + 1};
      levels_[256 - k] = {size.bits << 1 | 1u, size.length + 1};
    }
  }

  // Whole groups; codes past the end are 0.
  void put(const int8_t* codes, int count) {
    WordWriter writer = writer_;  // in registers
    int64_t next = next_;
    for (int i = 0; i < count; i += kGroup, position_ += kGroup)
      for (uint64_t left = not_zero(codes + i); left != 0; left &= left - 1) {
        const int lane = lowest_one(left);
        const int64_t zeros = position_ + lane - next;
        next += zeros + 1;
        const Gamma gap = zeros < kGaps ? gaps_[zeros] : gamma_of(uint32_t(zeros + 1));
        const Gamma level = levels_[uint8_t(codes[i + lane])];
        writer.put(uint64_t(gap.bits) | uint64_t(level.bits) << gap.length, gap.length + level.length);
      }
    writer_ = writer;
    next_ = next;
  }

  // Ends a range of so many elements and begins another one; returns where the stream of the next one begins.
  uint8_t* finish(int64_t elements, uint8_t* out) {
    if (const int64_t zeros = elements - next_) {
      const Gamma gap = gamma_of(uint32_t(zeros + 1));
      writer_.put(gap.bits, gap.length);
    }
    if (const int last = writer_.filled) writer_.put((1u << (8 - last)) - 1, 8 - last);
    const int64_t bytes = writer_.at - stream_;
    memcpy(out, stream_, size_t(bytes));
    writer_ = {stream_};
    next_ = position_ = 0;
    return out + bytes;
  }

 private:
  static constexpr int kGaps = 256;
  static constexpr int kMostBits = 15;  // of a level, with nothing but 0 before it or not

  Gamma gaps_[kGaps], levels_[256];
  uint8_t stream_[kEliasRange * kMostBits / 8 + sizeof(uint64_t)];
  WordWriter writer_{stream_};
  int64_t position_ = 0, next_ = 0;
};

// What a block loses with a norm, in squares; `values` is room for it.
template <class T> HVC_INLINE double lost_with(float norm, int32_t levels, const T* x, int64_t count, Work<T>* values) {
  using W = Work<T>;
  const W unit = W(1.0 / double(levels)), wide = W(norm);
  const float limit = level_limit(levels);
  const Scaling<W> scaling = scaling_for(wide, W(limit));
  for (int64_t at = 0; at < count; at += kChunk)
    each_element(int(std::min<int64_t>(kChunk, count - at)), [&](int i) {
      const W value = W(to_work(x[at + i]));
      values[at + i] = value - decoded(level_of(scaled(value, scaling), limit, kHalf), unit, wide);
    });
  double squares = 0;
  Lanes<W> unused;
  int64_t nonfinite = 0;
  for (int64_t at = 0; at < count; at += kBlock)
    squares += sum_block<kPower2, false>(values + at, std::min(kBlock, count - at), unused, nonfinite);
  return squares;
}

template <class T> HVC_INLINE float widest_norm(const QsgdShape& shape, double error, const T* x, int64_t count,
                                                Work<T>* values, int64_t& nonfinite) {
  const int32_t levels = levels_of(shape.bits);
  const Moments found = moments_of(kPower2, x, count, nonfinite);
  WidestNorm norm(error, found.squares, found.largest, count, levels);
  while (norm.more()) norm.lost(lost_with(norm.next(), levels, x, count, values));
  return norm.best();
}

// Streams of ranges, one behind the other; returns how many bytes they take.
template <class T>
int64_t encode(const EliasEncode<T>& e, int64_t first_range, int64_t last_range, uint8_t* streams, int64_t& nonfinite) {
  Draws draws(draws_of(e.key));
  alignas(64) Work<T> values[kMostBlock];
  LevelWriter writer(levels_of(e.shape.bits));
  const int64_t block = e.shape.block, blocks = ceil_div(e.count, block), in_range = blocks_in_range(block);
  uint8_t* norms = e.section + 4 * elias_ranges(e.count, block);
  uint8_t* begin = streams;
  int64_t found = 0;
  for (int64_t range = first_range; range < last_range; ++range) {
    const int64_t first = range * in_range, end = std::min(first + in_range, blocks);
    for (int64_t i = first; i < end; ++i) {
      const T* x = e.grad + i * block;
      const int64_t count = std::min(block, e.count - i * block);
      const float norm =
          e.error > 0 ? widest_norm(e.shape, e.error, x, count, values, found) : norm_of(e.shape.norm, x, count, found);
      memcpy(norms + i * kNormBytes, &norm, sizeof norm);
      quantise_block(e.shape, x, count, norm, draws, e.offset + i * block,
                     [&](const int8_t* codes, int chunk) { writer.put(codes, chunk); });
    }
    uint8_t* finished = writer.finish(std::min(end * block, e.count) - first * block, begin);
    store_bytes(e.section + 4 * range, uint32_t(finished - begin));
    begin = finished;
  }
  nonfinite = found;
  return begin - streams;
}

// ---- decode -----------------------------------------------------------------------------------------------

// Ranges that are read in turns: a code begins where the one before it ends, so one stream alone waits for itself.
constexpr int kTogether = 4;

using Levels = int8_t[kEliasRange];

struct LevelStream {
  const uint8_t* data;
  uint64_t bits, elements;
  uint64_t at = 0, next = 0;  // bits and elements that are read
};

// A code that begins with so many zeros, and what follows it.
HVC_INLINE uint64_t read_gamma(uint64_t& word, int zeros) {
  const uint64_t high = uint64_t(1) << zeros;
  word = word >> zeros >> 1;
  const uint64_t low = word & (high - 1);
  word >>= zeros;
  return high + low;
}

// Puts the next level that is not 0 in its place. Says false, and does nothing, where that is for EliasReader: at the
// end, and where something is wrong. Every search ends at the highest bit, which no code that is right reaches.
HVC_INLINE bool read_level(LevelStream& s, uint64_t most, int8_t* into) {
  if (s.at + 64 > s.bits) return false;
  uint64_t word = load_bytes<uint64_t>(s.data + s.at / 8) >> (s.at % 8) | uint64_t(1) << 63;
  const int gap_zeros = lowest_one(word);
  const uint64_t end = s.next + read_gamma(word, gap_zeros);
  if (end > s.elements) return false;
  const auto minus = -int32_t(word & 1);
  word >>= 1;
  const int zeros = lowest_one(word);
  const uint64_t size = read_gamma(word, zeros);
  if (size > most) return false;
  into[end - 1] = int8_t((int32_t(size) ^ minus) - minus);
  s.next = end;
  s.at += uint64_t(2 * (gap_zeros + zeros) + 3);
  return true;
}

// Until one of them is at its end. Named one by one, they stay in registers.
HVC_INLINE void read_together(LevelStream* streams, uint64_t most, Levels* into) {
  LevelStream a = streams[0], b = streams[1], c = streams[2], d = streams[3];
  while (read_level(a, most, into[0]) & read_level(b, most, into[1]) & read_level(c, most, into[2]) &
         read_level(d, most, into[3])) {
  }
  streams[0] = a, streams[1] = b, streams[2] = c, streams[3] = d;
}

// The rest of a stream; returns whether it is malformed.
HVC_INLINE bool finish_levels(LevelStream s, int32_t most, Levels* into) {
  while (read_level(s, uint64_t(most), *into)) {
  }
  EliasReader reader(s.data, int64_t(s.bits / 8), int64_t(s.elements), most, int64_t(s.at), int64_t(s.next));
  int64_t position;
  int32_t level;
  while (reader.next(position, level)) (*into)[position] = int8_t(level);
  return reader.malformed();
}

// Adds the numbers of a range. A level of 0 is nothing, whatever the norm is.
template <class W> HVC_INLINE void add_levels(const int8_t* levels, int64_t count, const uint8_t* norms, int64_t block,
                                              W scale, W* __restrict sums) {
  using Int = typename Native<W>::Int;
  for (int64_t begin = 0; begin < count; begin += block, norms += kNormBytes) {
    float norm;
    memcpy(&norm, norms, sizeof norm);
    const int64_t end = std::min(begin + block, count);
    for (int64_t i = begin; i < end; ++i) {
      const Int level = levels[i], bits = bit_cast<Int>(decoded(int32_t(level), scale, W(norm)));
      sums[i] += bit_cast<W>(bits & -Int(level != 0));  // g++ makes a branch of a choice, and no vectors
    }
  }
}

// A section, and where the streams begin that were not asked for yet.
class SectionStreams {
 public:
  SectionStreams(const Section& s, int64_t ranges, int64_t blocks, int64_t first)
      : s_(s), norms_(4 * ranges), at_(norms_ + blocks * kNormBytes), too_short_(s.bytes < at_) {
    for (int64_t range = 0; range < first; ++range) next(range, 0);
  }

  // Of the range behind the one of the call before. One that is not there has no bytes, and so is malformed.
  LevelStream next(int64_t range, int64_t elements) {
    const LevelStream absent{s_.data, 0, uint64_t(elements)};
    if (too_short_) return absent;
    const int64_t bytes = load_bytes<uint32_t>(s_.data + 4 * range), at = at_;
    at_ += bytes;
    return at_ > s_.bytes ? absent : LevelStream{s_.data + at, 8 * uint64_t(bytes), uint64_t(elements)};
  }

  // None where the section is too short: all of its ranges are malformed then.
  const uint8_t* norms(int64_t block) const { return too_short_ ? nullptr : s_.data + norms_ + block * kNormBytes; }

 private:
  const Section s_;
  const int64_t norms_;
  int64_t at_;
  const bool too_short_;
};

// Where a stream has fewer bits than elements by this factor, it is read and added level by level: that takes time for
// levels, and all else here for elements.
constexpr int kSparse = 5;

// Adds the levels of a stream; returns whether it is malformed.
template <class W>
HVC_INLINE bool add_sparse(const LevelStream& s, int32_t most, const uint8_t* norms, int64_t block, W scale, W* sums) {
  EliasReader reader(s.data, int64_t(s.bits / 8), int64_t(s.elements), most);
  int64_t position;
  int32_t level;
  while (reader.next(position, level)) {
    float norm;
    memcpy(&norm, norms + position / block * kNormBytes, sizeof norm);
    sums[position] += decoded(level, scale, W(norm));
  }
  return reader.malformed();
}

// A range of a section, and the sums that its levels go to.
template <class W> struct SectionRange {
  LevelStream stream;
  const uint8_t* norms;
  W* sums;
};

// Adds up to kTogether ranges in their order; returns how many are malformed.
template <class T>
int64_t add_ranges(const EliasDecode<T>& d, const SectionRange<Work<T>>* ranges, int number, Levels* levels) {
  const int32_t most = levels_of(d.shape.bits);
  const auto scale = Work<T>(d.scale);
  LevelStream streams[kTogether];
  uint64_t bits = 0, elements = 0;
  for (int i = 0; i < number; ++i) {
    streams[i] = ranges[i].stream;
    bits += streams[i].bits, elements += streams[i].elements;
  }
  int64_t wrong = 0;
  if (kSparse * bits < elements) {
    for (int i = 0; i < number; ++i)
      wrong += add_sparse(streams[i], most, ranges[i].norms, d.shape.block, scale, ranges[i].sums);
    return wrong;
  }
  memset(levels, 0, size_t(number) * sizeof *levels);
  if (number == kTogether) read_together(streams, uint64_t(most), levels);
  for (int i = 0; i < number; ++i) {
    wrong += finish_levels(streams[i], most, levels + i);
    if (ranges[i].norms)
      add_levels(levels[i], int64_t(streams[i].elements), ranges[i].norms, d.shape.block, scale, ranges[i].sums);
  }
  return wrong;
}

// Returns the number of malformed ranges.
template <class T> int64_t decode(const EliasDecode<T>& d, int64_t first, int64_t last) {
  std::vector<Work<T>> sums(kTogether * kEliasRange);  // too much for the stacks of some systems
  const std::unique_ptr<Levels[]> levels(new Levels[kTogether]);
  const int64_t block = d.shape.block, in_range = blocks_in_range(block), length = in_range * block;
  std::vector<SectionStreams> sections;
  for (int64_t rank = 0; rank < d.number; ++rank)
    sections.emplace_back(d.sections[rank], elias_ranges(d.count, block), ceil_div(d.count, block), first);
  int64_t wrong = 0;
  for (int64_t range = first; range < last; range += kTogether) {
    const int number = int(std::min<int64_t>(kTogether, last - range));
    const int64_t begin = range * length, count = std::min(number * length, d.count - begin);
    memset(sums.data(), 0, size_t(count) * sizeof(Work<T>));
    SectionRange<Work<T>> waiting[kTogether];
    int held = 0;
    // Four at a time, whether of one section or, where it has fewer, of several.
    for (SectionStreams& section : sections)
      for (int i = 0; i < number; ++i) {
        waiting[held] = {section.next(range + i, std::min(length, count - i * length)),
                         section.norms((range + i) * in_range), sums.data() + i * length};
        if (++held < kTogether) continue;
        wrong += add_ranges(d, waiting, held, levels.get());
        held = 0;
      }
    wrong += add_ranges(d, waiting, held, levels.get());
    for (int64_t at = 0; at < count; at += kChunk)
      put_part(d.grad + begin + at, sums.data() + at, int(std::min<int64_t>(kChunk, count - at)), d.streamed);
  }
  stream_fence();
  return wrong;
}
