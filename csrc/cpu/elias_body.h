// QSGD with Elias codes. Compiled once per instruction set.

#include "qsgd_lanes.h"

// A code for each level that is not 0, and the elements that were passed since the last one.
class LevelWriter {
 public:
  LevelWriter(uint8_t* at, int32_t levels) : writer_(at) {
    for (int32_t k = 1; k <= levels; ++k) magnitudes_[k] = gamma_of(uint32_t(k));
  }

  void put(const int8_t* codes, int count) {
    for (int i = 0; i < count; i += 8) {
      uint64_t eight = 0;
      memcpy(&eight, codes + i, size_t(std::min(8, count - i)));
      int from = 0;
      while (eight != 0) {
        const int zeros = lowest_one(eight) / 8;
        put_level(uint32_t(zeros_ + zeros - from), codes[i + zeros]);
        zeros_ = 0, from = zeros + 1;
        eight &= from == 8 ? 0 : ~uint64_t(0) << (8 * from);
      }
      zeros_ += std::min(8, count - i) - from;
    }
  }

  uint8_t* finish() {
    if (zeros_ > 0) put_gamma(gamma_of(uint32_t(zeros_ + 1)));
    return writer_.finish();
  }

 private:
  void put_gamma(const Gamma& code) { writer_.put(code.bits, code.length); }
  void put_level(uint32_t zeros, int32_t level) {
    const Gamma gap = gamma_of(zeros + 1), size = magnitudes_[level < 0 ? -level : level];
    const uint32_t rest = uint32_t(level < 0) | size.bits << 1;
    if (__builtin_expect(gap.length + size.length < 32, 1)) {
      writer_.put(uint64_t(gap.bits) | uint64_t(rest) << gap.length, gap.length + 1 + size.length);
    } else {
      put_gamma(gap);
      writer_.put(rest, 1 + size.length);
    }
  }

  StreamWriter writer_;
  int64_t zeros_ = 0;
  Gamma magnitudes_[128];
};

template <class T> int64_t encode(const EliasEncode<T>& e, int64_t& nonfinite) {
  Draws draws(*e.key);
  const int64_t block = e.shape.block, blocks = ceil_div(e.count, block), in_range = blocks_in_range(block);
  uint8_t* lengths = e.out;
  uint8_t* norms = lengths + 4 * elias_ranges(e.count, block);
  uint8_t* begin = norms + blocks * kNormBytes;
  for (int64_t first = 0; first < blocks; first += in_range, lengths += 4) {
    LevelWriter writer(begin, levels_of(e.shape.bits));
    for (int64_t i = first; i < std::min(first + in_range, blocks); ++i) {
      const T* x = e.grad + i * block;
      const int64_t count = std::min(block, e.count - i * block);
      const float norm = norm_of(e.shape.norm, x, count, nonfinite);
      memcpy(norms + i * kNormBytes, &norm, sizeof norm);
      int64_t left = count;
      quantise_block(e.shape, x, count, norm, draws, e.offset + i * block, [&](const int8_t* codes, int chunk) {
        writer.put(codes, int(std::min<int64_t>(chunk, left)));
        left -= std::min<int64_t>(chunk, left);
      });
    }
    uint8_t* finished = writer.finish();
    store_bytes(lengths, uint32_t(finished - begin));
    begin = finished;
  }
  return begin - e.out;
}

// Adds the levels of one range to `sums`; returns whether it is malformed.
template <class T>
HVC_INLINE bool add_range(const EliasDecode<T>& d, const Section& s, int64_t range, int64_t stream, Work<T>* sums) {
  using W = Work<T>;
  const int64_t block = d.shape.block, in_range = blocks_in_range(block), first = range * in_range;
  const int64_t elements = std::min(in_range * block, d.count - first * block);
  const int64_t bytes = load_bytes<uint32_t>(s.data + 4 * range);
  if (stream + bytes > s.bytes) return true;
  const uint8_t* norms = s.data + 4 * elias_ranges(d.count, block) + first * kNormBytes;
  EliasReader reader(s.data + stream, bytes, elements, levels_of(d.shape.bits));
  int64_t position, end = 0;
  int32_t level;
  float norm = 0;
  while (reader.next(position, level)) {
    if (position >= end) {
      memcpy(&norm, norms + position / block * kNormBytes, sizeof norm);
      end = (position / block + 1) * block;
    }
    sums[position] += decoded(level, W(d.scale), W(norm));
  }
  return reader.malformed();
}

// Returns the number of malformed ranges.
template <class T> int64_t decode(const EliasDecode<T>& d, int64_t first, int64_t last) {
  using W = Work<T>;
  alignas(64) W sums[kEliasRange];
  const int64_t block = d.shape.block, length = blocks_in_range(block) * block;
  const int64_t head = 4 * elias_ranges(d.count, block) + ceil_div(d.count, block) * kNormBytes;
  std::vector<int64_t> streams(size_t(d.number), head);
  for (int64_t rank = 0; rank < d.number; ++rank)
    for (int64_t range = 0; range < first && d.sections[rank].bytes >= head; ++range)
      streams[size_t(rank)] += load_bytes<uint32_t>(d.sections[rank].data + 4 * range);
  int64_t wrong = 0;
  for (int64_t range = first; range < last; ++range) {
    const int64_t begin = range * length, count = std::min(length, d.count - begin);
    memset(sums, 0, size_t(count) * sizeof *sums);
    for (int64_t rank = 0; rank < d.number; ++rank) {
      const Section& s = d.sections[rank];
      if (s.bytes < head) {
        ++wrong;
        continue;
      }
      wrong += add_range(d, s, range, streams[size_t(rank)], sums);
      streams[size_t(rank)] += load_bytes<uint32_t>(s.data + 4 * range);
    }
    for (int64_t at = 0; at < count; at += kChunk)
      put_part(d.grad + begin + at, sums + at, int(std::min<int64_t>(kChunk, count - at)), d.streamed);
  }
  stream_fence();
  return wrong;
}
