// Sections of positions are written: a warp takes a range, a lane a position.
#pragma once
#include "rules/golomb.h"
#include "grid.h"
#include "scan.h"

namespace hvc {
namespace {

struct Given {
  const int32_t* positions;
  int64_t kept, count;
  int parameter;

  __host__ __device__ int64_t ranges() const { return ranges_for(count, parameter); }
};

// Of every range: its first position, how many there are, the bytes of its stream, and where it begins in the section.
struct Ranges {
  int64_t *firsts, *numbers, *streams, *begins;
};

// What a section begins with: a value, and for each range one number, the bytes of its stream, or two.
struct Head {
  const uint8_t* value;
  int value_bytes, numbers;

  __device__ int64_t bytes(int64_t ranges) const { return value_bytes + 4 * numbers * ranges; }
};

// How many positions are wrong, and how many blocks have looked. Clear before.
struct Measured {
  int64_t bad;
  unsigned arrived;
};

// Where a section begins in its memory and ends, as binary_encode() says, and how much of that there is.
struct Place {
  int64_t* ends;
  int64_t room;
};

// ---- lengths ----------------------------------------------------------------------------------------------

__device__ inline bool is_bad(const Given& g, int64_t i) {
  return g.positions[i] <= (i == 0 ? -1 : g.positions[i - 1]) || g.positions[i] >= g.count;
}

// The elements between position i and the one before it in its range, or the range's start.
__device__ inline uint32_t gap_of(const Given& g, int64_t range_begin, int64_t first, int64_t i) {
  const int64_t next = i == first ? range_begin : int64_t(g.positions[i - 1]) + 1;
  return uint32_t(g.positions[i] - next);
}

__device__ inline int64_t bits_of_gap(uint32_t gap, int parameter) { return (gap >> parameter) + 1 + parameter; }

// A range takes its stream's bytes and value_bytes(number of its positions). Nothing is read outside of the positions,
// whatever they are.
template <class ValueBytes>
__global__ void measure_kernel(Given g, Ranges r, ValueBytes value_bytes, Head head, Place place, Measured* measured) {
  int64_t bad = 0;
  for (int64_t i = first_item(); i < g.kept; i += item_stride()) bad += is_bad(g, i);
  add_count(&measured->bad, bad);
  const int64_t elements = range_elements(g.parameter);
  for (int64_t range = first_warp(); range < g.ranges(); range += warp_stride()) {
    const int64_t begin = range * elements;
    const int64_t first = first_not_below(g.kept, [&](int64_t i) { return g.positions[i] < begin; });
    const int64_t last = first_not_below(g.kept, [&](int64_t i) { return g.positions[i] < begin + elements; });
    int64_t bits = 0;
    for (int64_t i = first + lane_index(); i < last; i += kWarp)
      bits += bits_of_gap(gap_of(g, begin, first, i), g.parameter);
    for (int half = kWarp / 2; half > 0; half /= 2) bits += __shfl_down_sync(kAllLanes, bits, half);
    if (lane_index() != 0) continue;
    r.firsts[range] = first;
    r.numbers[range] = last - first;
    r.streams[range] = ceil_div(bits, 8);
    r.begins[range] = r.streams[range] + value_bytes(last - first);
  }
  if (!is_last_block(&measured->arrived)) return;
  const int64_t bytes =
      prefix_sums_of_block(g.ranges(), [&](int64_t range) { return __ldcg(r.begins + range); }, r.begins);
  if (threadIdx.x != 0) return;
  const int64_t begin = place.ends[0], all = head.bytes(g.ranges()) + bytes;
  const bool good = __ldcg(&measured->bad) == 0 && begin >= 0 && begin + all <= place.room;
  put_end(good ? all : -1, place.ends);
}

// ---- streams ----------------------------------------------------------------------------------------------

__device__ inline void fill_with_ones(uint8_t* bytes, int64_t count) {
  const int64_t before = min(int64_t(-reinterpret_cast<uintptr_t>(bytes) % 4), count), words = (count - before) / 4;
  for (int64_t i = lane_index(); i < words; i += kWarp) reinterpret_cast<uint32_t*>(bytes + before)[i] = ~0u;
  if (lane_index() < before) bytes[lane_index()] = 0xff;
  const int64_t after = before + 4 * words + lane_index();
  if (after < count) bytes[after] = 0xff;
}

// Of a code among ones only its zeros are to be written: the one behind the unary part, and those of the low bits.
// Other lanes write the other bits of a word, so that is atomic.
__device__ inline void put_zeros(uint8_t* stream, int64_t bit, uint32_t gap, int parameter) {
  const auto address = reinterpret_cast<uintptr_t>(stream);
  const int64_t at = bit + (gap >> parameter) + 8 * int64_t(address % 4);
  auto* word = reinterpret_cast<unsigned*>(address - address % 4) + at / 32;
  const uint32_t code = (gap & ((1u << parameter) - 1)) << 1, all = (2u << parameter) - 1;
  const uint64_t zeros = uint64_t(all & ~code) << (at % 32);
  atomicAnd(word, ~unsigned(zeros));
  if (zeros >> 32 != 0) atomicAnd(word + 1, ~unsigned(zeros >> 32));
}

// Calls put(where the values of a range are, j, value, whether there is a j-th one) in all lanes; put.load(i) is the
// value of position i. What is written next is fetched before.
template <class PutValue>
__global__ void write_kernel(Given g, Ranges r, Head head, const PutValue put, Place place, uint8_t* memory) {
  if (place.ends[1] < 0) return;
  uint8_t* const out = memory + place.ends[0];
  for (int64_t i = first_item(); i < head.value_bytes; i += item_stride()) out[i] = head.value[i];
  uint8_t* const ranges = out + head.bytes(g.ranges());
  for (int64_t range = first_warp(); range < g.ranges(); range += warp_stride()) {
    const int64_t first = r.firsts[range], number = r.numbers[range], begin = range * range_elements(g.parameter);
    uint8_t* const stream = ranges + r.begins[range];
    uint8_t* const lengths = out + head.value_bytes + 4 * head.numbers * range;
    if (lane_index() == 0) store_bytes(lengths, uint32_t(r.streams[range]));
    if (lane_index() == 1 && head.numbers == 2) store_bytes(lengths + 4, uint32_t(number));
    fill_with_ones(stream, r.streams[range]);
    __syncwarp();
    struct Code {
      uint32_t gap;
      decltype(put.load(0)) value;
    };
    const auto load = [&](int64_t j) {
      return j < number ? Code{gap_of(g, begin, first, first + j), put.load(first + j)} : Code{};
    };
    int64_t bit = 0;
    Code next = load(lane_index());
    for (int64_t j = lane_index(); j - lane_index() < number; j += kWarp) {
      const Code code = next;
      next = load(j + kWarp);
      int all;
      const int before = sum_before(j < number ? int(bits_of_gap(code.gap, g.parameter)) : 0, all);
      if (j < number) put_zeros(stream, bit + before, code.gap, g.parameter);
      put(stream + r.streams[range], j, code.value, j < number);
      bit += all;
    }
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

// Writes a section. What it needs of the device it finds there: nothing waits.
template <class ValueBytes, class PutValue> void write_section(const Given& g, const Head& head,
                                                               const ValueBytes& value_bytes, const PutValue& put,
                                                               const Place& place, uint8_t* out, Launch launch) {
  const int64_t ranges = g.ranges();
  const Scratch<Measured> measured(1, launch);
  const Scratch<int64_t> firsts(ranges, launch), numbers(ranges, launch), streams(ranges, launch),
      begins(ranges, launch);
  const Ranges r{firsts.get(), numbers.get(), streams.get(), begins.get()};
  clear(measured.get(), sizeof(Measured), launch);
  start(measure_kernel<ValueBytes>, std::max(g.kept, kWarp * std::max<int64_t>(ranges, 1)), launch, g, r, value_bytes,
        head, place, measured.get());
  start_blocks(write_kernel<PutValue>, std::min(std::max<int64_t>(ranges, 1), kMostBlocks), kWarp, launch, g, r, head,
               put, place, out);
}

}  // namespace
}  // namespace hvc
