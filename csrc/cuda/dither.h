// What the dithering kernels share: a thread draws for the eight elements of one Philox block; where codes lie.
#pragma once
#include "rules/dither.h"
#include "in_rows.h"

namespace hvc {

struct alignas(16) EightDraws {
  uint32_t words[4];
  __device__ uint32_t operator[](int i) const { return words[i / 2] >> (16 * (i % 2)) & 0xffffu; }
};
__device__ inline EightDraws draw(const Stream& s, int64_t group) {
  const uint32_t shift = s.shift * 0x00010001u;
  if (!s.drawn) return {{shift, shift, shift, shift}};
  const Counter r = philox4x32({uint32_t(group), s.c1, s.c2, s.c3}, s.k0, s.k1);
  if (shift == 0) return {{r.c0, r.c1, r.c2, r.c3}};
  return {{add_halves(r.c0, shift), add_halves(r.c1, shift), add_halves(r.c2, shift), add_halves(r.c3, shift)}};
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

// Calls use(place, load(i, row), row, random) for a lane's elements of a go, as each_of_go does. A lane draws for
// eight neighbours, and takes elements that are 32 apart, which warps read and write best: so draws change hands, in
// the block's shared memory. A stream whose groups do not begin with this go's elements takes one more of them.
template <class AGo, class Load, class Use>
__device__ void each_drawn(const Stream& s, int64_t offset, const AGo& go, const Load& load, const Use& use) {
  constexpr int kGroups = kWarp + 1;
  __shared__ EightDraws draws[kThreads / kWarp * kGroups];
  EightDraws* of_warp = draws + int(threadIdx.x) / kWarp * kGroups;
  const uint64_t element = uint64_t(offset + go.first);
  const int64_t group = int64_t(element / kDrawsPerGroup);
  const int shift = int(element % kDrawsPerGroup);
  const auto* mine = reinterpret_cast<const uint16_t*>(of_warp) + shift + lane_index();
  each_of_go(
      go, load,
      [&](const Place& place, const auto& value, const auto& row) {
        use(place, value, row, uint32_t(mine[place.k * kWarp]));
      },
      [&] {
        __syncwarp();  // all lanes have used the draws of the go before
        of_warp[lane_index()] = draw(s, group + lane_index());
        if (shift != 0 && lane_index() == 0) of_warp[kWarp] = draw(s, group + kWarp);
        __syncwarp();
      });
}

// ---- codes ------------------------------------------------------------------------------------------------

// Codes that are numbers of their own.
template <class Number> struct Whole {
  static __device__ void put(void* codes, const Place& place, uint32_t code) {
    static_cast<Number*>(codes)[place.i] = Number(code);
  }
};

// Two codes share a byte.
__device__ inline uint8_t nibble_at(const void* codes, int64_t i) {
  return static_cast<const uint8_t*>(codes)[uint64_t(i) / 2] >> (4 * (i & 1)) & 15;
}

}  // namespace hvc
