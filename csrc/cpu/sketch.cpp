// Count sketches: tables that add up, and the largest elements that can be read from them.
#include "rules/sketch.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "sketch_operands.h"
#include "visit.h"

namespace hvc {
namespace {

template <class W> const SketchSpan* span_of(const SketchTable<W>& s, int64_t unit) {
  return s.spans + span_index(s.spans, s.span_count, unit);
}

// Elements that may be among the largest, in index order.
template <class W> struct Candidates {
  std::unique_ptr<uint32_t[]> positions;
  std::unique_ptr<Int<W>[]> bits;
  int64_t capacity = 0, count = 0;
  bool full = false;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "sketch_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

// ---- encode -----------------------------------------------------------------------------------------------

constexpr int64_t kSharedLayer = 1 << 20;  // bytes of a layer that are worth starting threads for

// Layers one after the other, each shared among threads: no two blocks of a layer meet.
template <class T, class Range> int64_t encode_layers(const SketchEncode<T>& e, int threads, const Range& range) {
  const int64_t end = ceil_div(e.offset + e.count, kSketchBlock), places = e.map.places;
  int64_t nonfinite = 0;
  for (int64_t first = e.offset / kSketchBlock; first < end;) {
    const int64_t count = std::min(end, (first / places + 1) * places) - first;
    const int64_t bytes = count * kSketchBlock * int64_t(sizeof(T)) * (1 + e.map.rows);
    nonfinite += parallel_sum(threads, count, bytes, [&](int64_t from, int64_t to) {
      return range(e, 0, e.map.rows, first + from, first + to);
    });
    first += count;
  }
  return nonfinite;
}

// Rows shared among threads.
template <class T, class Range> int64_t encode_rows(const SketchEncode<T>& e, int threads, const Range& range) {
  const int64_t first = e.offset / kSketchBlock, end = ceil_div(e.offset + e.count, kSketchBlock);
  return parallel_sum(threads, e.map.rows, e.count * int64_t(sizeof(T)), [&](int64_t from, int64_t to) {
    const int64_t bad = range(e, int(from), int(to), first, end);
    return from == 0 ? bad : 0;  // every row sees every element
  });
}

// ---- the largest ------------------------------------------------------------------------------------------

constexpr int64_t kLeastSampled = 512, kMostSampled = 4096;  // units
constexpr int64_t kSampleStride = 8;  // between the two: ranking what is sampled takes longer than collecting
constexpr int64_t kRoom = 1 << 16;    // candidates beyond twice the number asked for

template <class W> class Top {
 public:
  Top(const SketchTable<W>& table, int64_t k, int threads)
      : s_(table), k_(k), threads_(threads), found_(size_t(std::max(threads, 1))) {}

  int64_t run(int64_t* positions, W* estimates) {
    // The guess decides how long it takes, never what is found.
    if (!collect(guess())) collect(exact_bound());
    return select(positions, estimates);
  }

 private:
  using I = Int<W>;

  template <class Body> void each_range(const Body& body) const {
    parallel_ranges(threads_, s_.units, s_.units * kSketchBlock * int64_t(sizeof(W)) * s_.map.rows, body);
  }

  // About the magnitude of the k-th largest, rather too low than too high; at least the smallest above 0.
  I guess() const {
    const int64_t stride =
        std::max(ceil_div(s_.units, kMostSampled), std::min(ceil_div(s_.units, kLeastSampled), kSampleStride));
    std::vector<I> sampled(size_t(ceil_div(s_.units, stride) * kSketchBlock));
    const auto sample = s_.map.rows == 1   ? HVC_CHOOSE(sample<1, W>)
                        : s_.map.rows == 3 ? HVC_CHOOSE(sample<3, W>)
                                           : HVC_CHOOSE(sample<5, W>);
    const int64_t count = sample(s_, stride, sampled.data());
    const double expected = double(k_) * double(count) / double(s_.units * kSketchBlock);
    int64_t deviation = 1;
    while (double(deviation * deviation) < expected) ++deviation;
    const int64_t rank = int64_t(expected) + 4 * deviation;
    if (rank >= count) return 1;
    const auto ranked = sampled.begin() + rank, end = sampled.begin() + count;
    std::nth_element(sampled.begin(), ranked, end, std::greater<I>());
    return std::max<I>(*ranked, 1);
  }

  // Whether what was collected holds the k largest.
  bool collect(I bound) {
    const auto range = s_.map.rows == 1   ? HVC_CHOOSE(collect<1, W>)
                       : s_.map.rows == 3 ? HVC_CHOOSE(collect<3, W>)
                                          : HVC_CHOOSE(collect<5, W>);
    for (auto& found : found_) found.count = 0, found.full = false;
    each_range([&](int64_t index, int64_t first, int64_t last) {
      Candidates<W>& found = found_[size_t(index)];
      const int64_t room = kSketchBlock + std::min((last - first) * kSketchBlock, 2 * k_ + kRoom);
      if (found.capacity < room) {
        found.positions.reset(new uint32_t[size_t(room)]);
        found.bits.reset(new I[size_t(room)]);
        found.capacity = room;
      }
      range(s_, bound, k_, found, first, last);
    });
    int64_t count = 0;
    bool full = false;
    for (const auto& found : found_) count += found.count, full = full || found.full;
    return !full && (count >= k_ || bound == 1);
  }

  // The magnitude of the k-th largest by counting, 16 bits at a time; 1 where that is 0.
  I exact_bound() const {
    constexpr int kBins = 1 << 16;
    const auto range = s_.map.rows == 1   ? HVC_CHOOSE(histogram<1, W>)
                       : s_.map.rows == 3 ? HVC_CHOOSE(histogram<3, W>)
                                          : HVC_CHOOSE(histogram<5, W>);
    I prefix = 0;
    int64_t rank = k_;
    for (int shift = int(sizeof(W)) * 8 - 16; shift >= 0; shift -= 16) {
      std::vector<int64_t> bins(found_.size() * kBins);
      each_range([&](int64_t index, int64_t first, int64_t last) {
        range(s_, prefix, shift, bins.data() + index * kBins, first, last);
      });
      int digit = kBins;
      for (int64_t here = 0; digit > 0; rank -= here) {
        --digit;
        here = 0;
        for (size_t i = 0; i < found_.size(); ++i) here += bins[i * kBins + size_t(digit)];
        if (here >= rank) break;
      }
      prefix = I(prefix << 16 | digit);
    }
    return std::max<I>(prefix, 1);
  }

  int64_t select(int64_t* positions, W* estimates) const {
    std::vector<I> magnitudes;
    for (const auto& found : found_)
      for (int64_t i = 0; i < found.count; ++i) magnitudes.push_back(found.bits[size_t(i)] & IntOf<W>::kMagnitude);
    I bound = 0;
    int64_t ties = 0;
    if (int64_t(magnitudes.size()) > k_) {
      std::nth_element(magnitudes.begin(), magnitudes.begin() + (k_ - 1), magnitudes.end(), std::greater<I>());
      bound = magnitudes[size_t(k_ - 1)];
      ties = k_ - std::count_if(magnitudes.begin(), magnitudes.begin() + k_, [&](I m) { return m > bound; });
    }
    int64_t count = 0;
    for (const auto& found : found_)
      for (int64_t i = 0; i < found.count; ++i) {
        const I bits = found.bits[size_t(i)], magnitude = bits & IntOf<W>::kMagnitude;
        if (magnitude < bound || (magnitude == bound && --ties < 0)) continue;
        positions[count] = found.positions[size_t(i)];
        estimates[count++] = bit_cast<W>(bits);
      }
    return count;
  }

  const SketchTable<W> s_;
  const int64_t k_;
  const int threads_;
  std::vector<Candidates<W>> found_;
};

// ---- single elements --------------------------------------------------------------------------------------

// The bijections of the layer that was asked for last: positions mostly ascend.
class Layers {
 public:
  explicit Layers(const SketchMap& map) : map_(map) { enter(0); }

  const Walk* walks(uint64_t layer) {
    if (layer != layer_) enter(layer);
    return walks_;
  }

 private:
  void enter(uint64_t layer) {
    layer_ = layer;
    for (int row = 0; row < map_.rows; ++row) walks_[row] = walk_of(map_, row, layer);
  }

  const SketchMap map_;
  uint64_t layer_ = 0;
  Walk walks_[kSketchRows];
};

}  // namespace

void sketch_encode(const void* grad, const void* residual, const void* momentum, double factor, Dtype dtype,
                   int64_t count, int64_t offset, int rows, int64_t places, const Stream* key, void* table,
                   int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const SketchEncode<T> e{static_cast<const T*>(grad),
                            static_cast<const W*>(residual),
                            static_cast<const W*>(momentum),
                            W(factor),
                            count,
                            offset,
                            {rows, uint32_t(places), *key},
                            static_cast<W*>(table)};
    const auto range = HVC_CHOOSE(encode<T>);
    const bool large = places * kSketchBlock * int64_t(sizeof(T)) >= kSharedLayer;
    *nonfinite = large ? encode_layers(e, launch.threads, range) : encode_rows(e, launch.threads, range);
  });
}

int64_t sketch_top(const void* table, Dtype dtype, int rows, int64_t places, const Stream* key, const Span* spans,
                   int64_t span_count, int64_t k, int64_t* positions, void* estimates, Launch launch) {
  const SketchSpans listed(spans, span_count);
  int64_t found = 0;
  k = std::min(k, listed.elements);
  if (k == 0) return 0;
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const SketchMap map{rows, uint32_t(places), *key};
    const SketchTable<W> s{static_cast<const W*>(table), map, listed.list.data(), listed.size(), listed.units};
    found = Top<W>(s, k, launch.threads).run(positions, static_cast<W*>(estimates));
  });
  return found;
}

void sketch_clear(void* table, Dtype dtype, int rows, int64_t places, const Stream* key, const int64_t* positions,
                  int64_t count, Launch launch) {
  const SketchMap map{rows, uint32_t(places), *key};
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    // Threads share rows: two positions may touch one cell.
    parallel_for(launch.threads, rows, 64 * rows * count, [&](int64_t first, int64_t last) {
      Layers layers(map);
      for (int64_t i = 0; i < count; ++i) {
        const Element e = element_of(map, uint64_t(positions[i]));
        const BlockBits bits = block_bits(map.key, e.block);
        const Walk* walks = layers.walks(e.layer);
        for (int row = int(first); row < int(last); ++row)
          static_cast<W*>(table)[cell_of(map, row, walks[row], bits, e)] = 0;
      }
    });
  });
}

}  // namespace hvc
