// QSGD with Elias codes: a warp writes the stream of a range, a thread reads it.
#include "rules/elias.h"

#include "blocks_of_codes.h"
#include "scan.h"
#include "turns.h"
#include "visit.h"

namespace hvc {
namespace {

// The sizes of a tensor's section.
struct Layout {
  int64_t count, block, blocks, ranges, length;  // `length`: elements of a whole range

  __host__ __device__ int64_t head() const { return 4 * ranges + kNormBytes * blocks; }
  __device__ int64_t elements(int64_t range) const { return min(length, count - range * length); }
};

template <class T> struct Quantise {
  const T* grad;
  Layout l;
  QsgdShape shape;
  double error;
  Stream key;
  int64_t offset;
  const int64_t* place;  // where the section begins in memory
  uint8_t* memory;
  int64_t room;
  uint64_t* codes;  // eight to a word; whole blocks
  int64_t* nonfinite;
};

struct Levels {
  Layout l;
  int32_t levels;
  double scale;
};

// ---- encoding ---------------------------------------------------------------------------------------------

template <class W, class Value>
__device__ float widest_norm(const QsgdShape& shape, double error, int64_t count, const Value& value) {
  const int32_t levels = levels_of(shape.bits);
  const float limit = level_limit(levels);
  const W unit = W(1.0 / double(levels));
  const Moments found = moments_of(count, value);
  WidestNorm norm(error, found.squares, found.largest, count, levels);
  while (norm.more()) {
    const W tried = W(norm.next());
    const Scaling<W> scaling = scaling_for(tried, W(limit));
    const auto lost = [&](int64_t j) {
      const W x = value(j);
      return x - decoded(level_of(scaled(x, scaling), limit, kHalf), unit, tried);
    };
    norm.lost(moments_of(count, lost).squares);
  }
  return norm.best();
}

template <class T> __global__ void quantise_kernel(Quantise<T> q) {
  using W = Work<T>;
  const int64_t block = q.l.block, begin = q.place[0];
  const bool has_room = begin >= 0 && begin + q.l.head() <= q.room;
  uint8_t* const norms = q.memory + begin + 4 * q.l.ranges;
  int64_t bad = 0;
  for (int64_t i = first_warp(); i < q.l.blocks; i += warp_stride()) {
    const T* x = q.grad + i * block;
    const int64_t count = min(block, q.l.count - i * block);
    const auto value = [&](int64_t j) { return W(to_work(x[j])); };
    for (int64_t j = lane_index(); j < count; j += kWarp) bad += !is_finite(x[j]);
    const float norm =
        q.error > 0 ? widest_norm<W>(q.shape, q.error, count, value) : norm_of(q.shape.norm, count, value);
    if (has_room) put_norm(norms + kNormBytes * i, norm);
    each_eight_codes<W>(q.shape, count, norm, q.key, q.offset + i * block, value,
                        [&](int64_t first, uint64_t bytes) { q.codes[(i * block + first) / kPacked] = bytes; });
  }
  add_count(q.nonfinite, bad);
}

// The largest of what the lanes before this one hold, and `none`; `all` is that of all lanes.
__device__ int largest_before(int mine, int none, int& all) {
  int most = max(mine, none);
  for (int step = 1; step < kWarp; step *= 2) most = max(most, __shfl_up_sync(kAllLanes, most, step));
  all = __shfl_sync(kAllLanes, most, kWarp - 1);
  const int before = __shfl_up_sync(kAllLanes, most, 1);
  return lane_index() == 0 ? none : before;
}

// Calls use(level, elements from the last level that is not 0) for the levels of a word that are not 0.
template <class Use> __device__ void each_level(uint64_t eight, int first, int last, const Use& use) {
  while (eight != 0) {
    const int i = lowest_one(eight) / 8;
    use(int32_t(int8_t(eight >> (8 * i))), uint32_t(first + i - last));
    last = first + i;
    eight &= i == 7 ? 0 : ~uint64_t(0) << (8 * (i + 1));
  }
}

__device__ int bits_of(int32_t level, uint32_t gap) {
  return 2 * highest_bit(gap) + 1 + 1 + 2 * highest_bit(uint32_t(level < 0 ? -level : level)) + 1;
}

// Bits into cleared memory, of which other lanes write the rest of the first and of the last word.
class SharedWriter {
 public:
  __device__ SharedWriter(uint8_t* base, int64_t bit) {
    const auto address = reinterpret_cast<uintptr_t>(base);
    const int64_t at = bit + 8 * int64_t(address % 4);
    word_ = reinterpret_cast<unsigned*>(address - address % 4) + at / 32;
    filled_ = int(at % 32);
  }
  // At most 32 bits.
  __device__ void put(uint32_t bits, int length) {
    pending_ |= uint64_t(bits) << filled_;
    filled_ += length;
    if (filled_ < 32) return;
    atomicOr(word_++, unsigned(pending_));
    pending_ >>= 32;
    filled_ -= 32;
  }
  __device__ void put(const Gamma& code) { put(code.bits, code.length); }
  __device__ void finish() {
    if (pending_ != 0) atomicOr(word_, unsigned(pending_));
  }

 private:
  unsigned* word_;
  uint64_t pending_ = 0;
  int filled_;
};

// Calls lane(word, its first element, the last level before it, the lane's first bit) for every eight codes of a range;
// returns the bits of its stream and the last element whose level is not 0, or -1.
template <class Lane> __device__ int2 each_word(const uint64_t* words, int elements, const Lane& lane) {
  int at = 0, last = -1;
  for (int group = 0; group < elements; group += kWarp * kPacked) {
    const int first = group + kPacked * lane_index();
    const uint64_t eight = first < elements ? words[first / kPacked] : 0;
    const int mine = eight == 0 ? -1 : first + (63 - __clzll(static_cast<long long>(eight))) / 8;
    int next, all, bits = 0;
    const int before = largest_before(mine, last, next);
    each_level(eight, first, before, [&](int32_t level, uint32_t gap) { bits += bits_of(level, gap); });
    lane(eight, first, before, at + sum_before(bits, all));
    last = next;
    at += all;
  }
  return {at, last};
}

// Where the stream ends after the levels: with a code for the elements that are left.
__device__ int tail_bits(int elements, int last) {
  return last + 1 == elements ? 0 : 2 * highest_bit(uint32_t(elements - last)) + 1;
}

__global__ void measure_kernel(const uint64_t* codes, Layout l, int64_t* lengths) {
  for (int64_t range = first_warp(); range <= l.ranges; range += warp_stride()) {
    if (range == l.ranges) {
      if (lane_index() == 0) lengths[range] = 0;
      return;
    }
    const int elements = int(l.elements(range));
    const int2 end = each_word(codes + range * (l.length / kPacked), elements, [](uint64_t, int, int, int) {});
    if (lane_index() == 0) lengths[range] = ceil_div(end.x + tail_bits(elements, end.y), 8);
  }
}

// Clears the memory of the streams, whose bytes are the last of `begins`, and says where the section ends.
__global__ void clear_kernel(Layout l, const int64_t* begins, int64_t* place, uint8_t* memory, int64_t room) {
  const int64_t bytes = begins[l.ranges], end = place[0] + l.head() + bytes;
  const bool good = place[0] >= 0 && end <= room;
  if (first_item() == 0) put_end(good ? l.head() + bytes : -1, place);
  if (!good) return;
  uint8_t* const streams = memory + place[0] + l.head();
  const int64_t before = min(int64_t(-reinterpret_cast<uintptr_t>(streams) % 4), bytes), words = (bytes - before) / 4;
  for (int64_t i = first_item(); i < words; i += item_stride()) reinterpret_cast<uint32_t*>(streams + before)[i] = 0;
  if (first_item() < before) streams[first_item()] = 0;
  const int64_t after = before + 4 * words + first_item();
  if (after < bytes) streams[after] = 0;
}

// `begins` counts bytes from the first stream.
__global__ void streams_kernel(const uint64_t* codes, Layout l, const int64_t* begins, const int64_t* place,
                               uint8_t* memory) {
  if (place[1] < 0) return;
  uint8_t* const out = memory + place[0];
  for (int64_t range = first_warp(); range < l.ranges; range += warp_stride()) {
    const int elements = int(l.elements(range));
    uint8_t* stream = out + l.head() + begins[range];
    const auto lane = [&](uint64_t eight, int first, int before, int bit) {
      if (eight == 0) return;
      SharedWriter writer(stream, bit);
      each_level(eight, first, before, [&](int32_t level, uint32_t gap) {
        const Gamma size = gamma_of(uint32_t(level < 0 ? -level : level));
        writer.put(gamma_of(gap));
        writer.put(uint32_t(level < 0) | size.bits << 1, 1 + size.length);
      });
      writer.finish();
    };
    const int2 end = each_word(codes + range * (l.length / kPacked), elements, lane);
    if (lane_index() != 0) continue;
    SharedWriter writer(stream, end.x);
    if (end.y + 1 != elements) writer.put(gamma_of(uint32_t(elements - end.y)));
    const int over = (end.x + tail_bits(elements, end.y)) % 8;
    if (over != 0) writer.put((1u << (8 - over)) - 1, 8 - over);
    writer.finish();
    store_bytes(out + 4 * range, uint32_t(begins[range + 1] - begins[range]));
  }
}

// ---- decoding ---------------------------------------------------------------------------------------------

struct StreamBytes {
  __device__ int64_t operator()(const Section& s, const Form&, int64_t range) const {
    return load_bytes<uint32_t>(s.data + 4 * range);
  }
};

// A thread takes a range.
template <class T, class Table>
__global__ void lists_kernel(const __grid_constant__ Table table, Lists<Work<T>> lists, Levels s) {
  using W = Work<T>;
  each_range(table, first_item(), item_stride(), [&](const Summed<T>& t, int64_t part, int64_t range) {
    const Section& section = lists.section(t, part);
    const int64_t at = s.l.head() + lists.offsets[t.range_of(part, range)];
    const int64_t bytes = load_bytes<uint32_t>(section.data + 4 * range), first = lists.first_entry(t, part, range);
    int64_t size = 0;
    bool malformed = true;
    if (at + bytes <= section.bytes) {
      const uint8_t* norms = section.data + 4 * s.l.ranges + kNormBytes * (range * s.l.length / s.l.block);
      Entry<W>* const list = lists.entries + first;
      EliasReader reader(section.data + at, bytes, s.l.elements(range), s.levels);
      int64_t position, end = 0;
      int32_t level;
      float norm = 0;
      while (reader.next(position, level)) {
        if (position >= end) {
          const uint32_t block = uint32_t(position) / uint32_t(s.l.block);
          norm = bit_cast<float>(load_bytes<uint32_t>(norms + kNormBytes * block));
          end = (block + 1) * s.l.block;
        }
        list[size++] = {int32_t(position), decoded(level, W(s.scale), W(norm))};
      }
      malformed = reader.malformed();
    }
    lists.lists[t.range_of(part, range)] = {first, size};
    add_count(t.wrong, malformed);
  });
}

// ---- launchers --------------------------------------------------------------------------------------------

Layout layout_of(int64_t count, int64_t block) {
  return {count, block, ceil_div(count, block), elias_ranges(count, block), blocks_in_range(block) * block};
}

}  // namespace

void elias_encode(const void* grad, Dtype dtype, int64_t count, QsgdShape shape, double error, const Stream* key,
                  int64_t offset, int64_t* place, uint8_t* out, int64_t room, int64_t* nonfinite, Launch launch) {
  const Layout l = layout_of(count, shape.block);
  const Scratch<uint64_t> codes(l.blocks * (l.block / kPacked), launch);
  const Scratch<int64_t> begins(l.ranges + 1, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    start(quantise_kernel<T>, l.blocks * kWarp, launch,
          Quantise<T>{static_cast<const T*>(grad), l, shape, error, draws_of(key), offset, place, out, room,
                      codes.get(), nonfinite});
  });
  start(measure_kernel, (l.ranges + 1) * kWarp, launch, codes.get(), l, begins.get());
  prefix_sums(begins.get(), begins.get(), l.ranges + 1, launch);
  constexpr int64_t kMostItems = 1 << 18;
  start(clear_kernel, std::clamp<int64_t>(count, kWarp, kMostItems), launch, l, begins.get(), place, out, room);
  start(streams_kernel, l.ranges * kWarp, launch, codes.get(), l, begins.get(), place, out);
}

void elias_decode(const Section* sections, int64_t section_count, Dtype dtype, int64_t count, QsgdShape shape,
                  double scale, void* grad, int64_t* wrong, Launch launch) {
  const Layout l = layout_of(count, shape.block);
  constexpr int kFewestBits = 3;  // of a level: two codes and a sign
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    Summed<T> sums{};
    sums.cut = {count, l.length, l.ranges};
    sums.form = {l.head(), kFewestBits, 0, 0};
    sums.grad = static_cast<T*>(grad);
    sums.wrong = wrong;
    const Levels levels{l, levels_of(shape.bits), scale};
    add_sections(std::vector<Summed<T>>{sums}, sections, section_count, -1, Settle<T>{}, StreamBytes{}, launch,
                 [&](const auto& table, const Lists<W>& lists) {
                   start_spread(lists_kernel<T, std::decay_t<decltype(table)>>, table.units(), launch, table, lists,
                                levels);
                 });
  });
}

}  // namespace hvc
