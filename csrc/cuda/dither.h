// What the dithering kernels share: a thread draws for the eight elements of one Philox block.
#pragma once
#include "rules/dither.h"
#include "launch.h"

namespace hvc {

// The groups of eight that cover `count` elements of a stream from `offset` on.
struct Groups {
  int64_t first, last;
};
__host__ __device__ inline Groups groups_of(int64_t offset, int64_t count) {
  return {offset / kDrawsPerGroup, ceil_div(offset + count, kDrawsPerGroup)};
}

struct EightDraws {
  uint32_t words[4];
  __device__ uint32_t operator[](int i) const { return words[i / 2] >> (16 * (i % 2)) & 0xffffu; }
};
__device__ inline EightDraws draw(const Stream& s, int64_t group) {
  const Counter r = philox4x32({uint32_t(group), s.c1, s.c2, s.c3}, s.k0, s.k1);
  return {{r.c0, r.c1, r.c2, r.c3}};
}

// The draws of eight elements of a stream, of which the first need not begin a group: two groups, moved down.
__device__ inline EightDraws draw_from(const Stream& s, int64_t element) {
  const int64_t group = element / kDrawsPerGroup;
  const int shift = int(element % kDrawsPerGroup);
  const EightDraws low = draw(s, group);
  if (shift == 0) return low;
  const EightDraws high = draw(s, group + 1);
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = low.words[i], words[i + 4] = high.words[i];
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = shift & 4 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = shift & 2 ? words[i + 1] : words[i];
  EightDraws moved;
#pragma unroll
  for (int i = 0; i < 4; ++i) moved.words[i] = shift & 1 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
  return moved;
}

// The units of work on `count` elements: a warp takes a group for every lane in one go.
__host__ __device__ inline int64_t drawn_units(int64_t offset, int64_t count) {
  const Groups groups = groups_of(offset, count);
  return count == 0 ? 0 : ceil_div(groups.last - groups.first, kWarp);
}

// Calls use(element, random) for the elements of [0, count) in this lane's group of a unit.
template <class Use>
__device__ void each_drawn(const Stream& s, int64_t offset, int64_t count, int64_t unit, const Use& use) {
  const Groups groups = groups_of(offset, count);
  const int64_t group = groups.first + unit * kWarp + lane_index();
  if (group >= groups.last) return;
  const EightDraws random = draw(s, group);
#pragma unroll
  for (int i = 0; i < kDrawsPerGroup; ++i) {
    const int64_t element = group * kDrawsPerGroup + i - offset;
    if (element >= 0 && element < count) use(element, random[i]);
  }
}

// The same for all units.
template <class Use> __device__ void each_drawn(const Stream& s, int64_t offset, int64_t count, const Use& use) {
  for (int64_t unit = first_warp(); unit < drawn_units(offset, count); unit += warp_stride())
    each_drawn(s, offset, count, unit, use);
}

// Two codes share a byte, and so may two threads where the stream's groups do not begin at even elements.
__device__ inline void put_half(uint8_t* codes, int64_t element, uint32_t code) {
  const auto address = reinterpret_cast<uintptr_t>(codes + element / 2);
  const int shift = int(address % 4) * 8 + int(element % 2) * 4;
  auto* word = reinterpret_cast<unsigned int*>(address - address % 4);
  atomicAnd(word, ~(15u << shift));
  atomicOr(word, (code & 15u) << shift);
}

// The last of `count` codes has a byte to itself if the number is odd: the other half is 0.
__device__ inline void put_nibble(uint8_t* codes, int64_t element, int64_t count, uint32_t code) {
  put_half(codes, element, code);
  if (element + 1 == count && element % 2 == 0) put_half(codes, count, 0);
}
__device__ inline uint32_t nibble(const uint8_t* codes, int64_t element) {
  return codes[element / 2] >> (4 * (element % 2)) & 15u;
}

}  // namespace hvc
