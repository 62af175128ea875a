// Sections of positions are written, those of all tensors one after the other: a warp takes a range, a lane a
// position.
#pragma once
#include <vector>

#include "rules/golomb.h"
#include "grid.h"
#include "scan.h"
#include "table.h"

namespace hvc {
namespace {

// The positions of a tensor, and what is written with them. `before` is what the heads of earlier sections take.
struct Given {
  const int32_t* positions;
  int64_t kept;
  const void *values, *head;
  int64_t form, count, parameter, before;

  __host__ __device__ int64_t ranges() const { return ranges_for(count, int(parameter)); }
};

// Of every range: its first position, how many there are, the bytes of its stream, and what all before it take.
struct Ranges {
  int64_t *firsts, *numbers, *streams, *begins;
};

// From which tensor on positions are wrong, counted from the end of the table, and how many blocks have looked. Clear
// before.
struct Measured {
  unsigned bad, arrived;
};

// Where sections begin in their memory and end, as binary_encode() says, and how much of that there is.
struct Place {
  int64_t* ends;
  int64_t room;
};

// ---- lengths ----------------------------------------------------------------------------------------------
// `Values` says what a section has beside the streams: the bytes of its value, how many numbers there are of a range,
// and what values take.

// What a section begins with: its value, then for each range one number, the bytes of its stream, or two.
template <class Values> __host__ __device__ int64_t head_of(const Given& g) {
  return Values::value_bytes(g) + 4 * Values::kNumbers * g.ranges();
}

__device__ inline bool is_bad(const Given& g, int64_t i) {
  return g.positions[i] <= (i == 0 ? -1 : g.positions[i - 1]) || g.positions[i] >= g.count;
}

// The elements between position i and the one before it in its range, or the range's start.
__device__ inline uint32_t gap_of(const Given& g, int64_t range_begin, int64_t first, int64_t i) {
  const int64_t next = i == first ? range_begin : int64_t(g.positions[i - 1]) + 1;
  return uint32_t(g.positions[i] - next);
}

__device__ inline int64_t bits_of_gap(uint32_t gap, int parameter) { return (gap >> parameter) + 1 + parameter; }

// Looks whether any of a share of the positions is wrong.
__device__ inline bool any_bad(const Given& g, int64_t share, int64_t shares) {
  bool bad = false;
#pragma unroll 4
  for (int64_t i = g.kept * share / shares + lane_index(); i < g.kept * (share + 1) / shares; i += kWarp)
    bad |= is_bad(g, i);
  return __ballot_sync(kAllLanes, bad) != 0;
}

// A range takes its stream's bytes and its values'. Nothing is read outside of the positions, whatever they are.
template <class Values> __device__ void measure_range(const Given& g, int64_t range, int64_t unit, const Ranges& r) {
  const int parameter = int(g.parameter);
  const int64_t begin = range * range_elements(parameter), end = begin + range_elements(parameter);
  const int64_t first = first_not_below(g.kept, [&](int64_t i) { return g.positions[i] < begin; });
  const int64_t last = first_not_below(g.kept, [&](int64_t i) { return g.positions[i] < end; });
  int64_t bits = 0;
#pragma unroll 4
  for (int64_t i = first + lane_index(); i < last; i += kWarp)
    bits += bits_of_gap(gap_of(g, begin, first, i), parameter);
  for (int half = kWarp / 2; half > 0; half /= 2) bits += __shfl_down_sync(kAllLanes, bits, half);
  if (lane_index() != 0) return;
  const int64_t number = max(last - first, int64_t(0)), stream = number > 0 ? ceil_div(bits, 8) : 0;
  r.firsts[unit] = first;
  r.numbers[unit] = number;
  r.streams[unit] = stream;
  r.begins[unit] = g.ranges() == 0 ? 0 : stream + Values::bytes(g, number);
}

template <class Values, class Table>
__global__ void measure_kernel(const __grid_constant__ Table table, Ranges r, Place place, Measured* measured) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Given& g = table.items[item];
    const int64_t range = unit - table.begins[item];
    const bool bad = any_bad(g, range, table.begins[item + 1] - table.begins[item]);
    if (bad && lane_index() == 0) atomicMax(&measured->bad, unsigned(table.count - item));
    measure_range<Values>(g, range, unit, r);
  }
  if (!is_last_block(&measured->arrived)) return;
  const int64_t bytes =
      prefix_sums_of_block(table.units(), [&](int64_t unit) { return __ldcg(r.begins + unit); }, r.begins);
  const int64_t first_bad = table.count - int64_t(__ldcg(&measured->bad)), begin = place.ends[0];
  for (int64_t item = threadIdx.x; item < table.count; item += kThreads) {
    const Given& g = table.items[item];
    const int64_t ranges = item + 1 < table.count ? r.begins[table.begins[item + 1]] : bytes;
    const int64_t end = begin + g.before + head_of<Values>(g) - table.items[0].before + ranges;
    place.ends[item + 1] = begin >= 0 && item < first_bad && end <= place.room ? end : -1;
  }
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
template <class Put> __device__ void write_range(const Given& g, int64_t begin, int64_t first, int64_t number,
                                                 uint8_t* stream, uint8_t* values, const Put& put) {
  const int parameter = int(g.parameter);
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
    const int before = sum_before(j < number ? int(bits_of_gap(code.gap, parameter)) : 0, all);
    if (j < number) put_zeros(stream, bit + before, code.gap, parameter);
    put(values, j, code.value, j < number);
    bit += all;
  }
}

template <class Values, class Table>
__global__ void write_kernel(const __grid_constant__ Table table, Ranges r, Place place, uint8_t* memory) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    if (place.ends[item + 1] < 0) continue;
    const Given& g = table.items[item];
    const int64_t range = unit - table.begins[item], value_bytes = Values::value_bytes(g);
    uint8_t* const out = memory + place.ends[item];
    if (range == 0)
      for (int64_t i = lane_index(); i < value_bytes; i += kWarp) out[i] = static_cast<const uint8_t*>(g.head)[i];
    if (g.ranges() == 0) continue;
    uint8_t* const stream = out + head_of<Values>(g) + r.begins[unit] - r.begins[table.begins[item]];
    uint8_t* const lengths = out + value_bytes + 4 * Values::kNumbers * range;
    const int64_t bytes = r.streams[unit], number = r.numbers[unit];
    if (lane_index() == 0) store_bytes(lengths, uint32_t(bytes));
    if (lane_index() == 1 && Values::kNumbers == 2) store_bytes(lengths + 4, uint32_t(number));
    fill_with_ones(stream, bytes);
    __syncwarp();
    Values::with_put(g, [&](const auto& put) {
      write_range(g, range * range_elements(int(g.parameter)), r.firsts[unit], number, stream, stream + bytes, put);
    });
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

// Writes the sections of all tensors. What it needs of the device it finds there: nothing waits.
template <class Values>
void write_sections(std::vector<Given>& all, int64_t* ends, uint8_t* out, int64_t room, Launch launch) {
  int64_t before = 0;
  for (Given& g : all) g.before = before, before += head_of<Values>(g);
  const auto given = [&](int64_t i) { return all[size_t(i)]; };
  const auto units = [&](int64_t i) { return std::max<int64_t>(all[size_t(i)].ranges(), 1); };
  in_tables<Given>(int64_t(all.size()), given, units, [&](const auto& table, int64_t first) {
    using Table = std::decay_t<decltype(table)>;
    const int64_t ranges = table.units();
    const Scratch<Measured> measured(1, launch);
    const Scratch<int64_t> numbers(4 * ranges, launch);
    int64_t* const at = numbers.get();
    const Ranges r{at, at + ranges, at + 2 * ranges, at + 3 * ranges};
    const Place place{ends + first, room};
    clear(measured.get(), sizeof(Measured), launch);
    start(measure_kernel<Values, Table>, ranges * kWarp, launch, table, r, place, measured.get());
    start_blocks(write_kernel<Values, Table>, std::min(ranges, kMostBlocks), kWarp, launch, table, r, place, out);
  });
}

}  // namespace
}  // namespace hvc
