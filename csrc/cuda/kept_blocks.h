// Blocks of QSGD of which a warp keeps the values: those of a gradient, or of a sum.
#pragma once
#include "blocks_of_codes.h"
#include "pack.h"
#include "parts.h"

namespace hvc {
namespace {

__device__ inline float norm_at(const uint8_t* record) { return bit_cast<float>(load_bytes<uint32_t>(record)); }

// The values of a block that a warp keeps: all of them where it is not longer than this.
constexpr int kGoes = 2;
constexpr int kKept = kGoes * int(kOfWarp);
template <class W> struct Kept {
  W x[kGoes][kOfLane];  // past the end 0, or what counts nowhere
};

// Calls body(g, k) for the values of a lane, those of a go of a warp after those of the one before.
template <class Body> __device__ void each_kept(const Body& body) {
#pragma unroll
  for (int j = 0; j < kGoes * kOfLane; ++j) body(j / kOfLane, j % kOfLane);
}
// The same, one go after the other: what the next one needs is not fetched before, for registers are scarce.
template <class Body> __device__ void each_kept_apart(const Body& body) {
#pragma unroll
  for (int g = 0; g < kGoes; ++g) {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) body(g, k);
    __syncwarp();
  }
}
__device__ inline int kept_at(int g, int k) { return g * int(kOfWarp) + k * kWarp; }  // from the lane's first on

// Calls body(number of a go, its first element) for those of kKept elements from `first` on that begin before `end`.
template <class Body> __device__ void each_kept_go(int first, int end, const Body& body) {
#pragma unroll
  for (int g = 0; g < kGoes; ++g)
    if (first + g * int(kOfWarp) < end) body(g, first + g * int(kOfWarp));
}

// The norm of the values of a block, as norm_of finds it, and how many of a lane's are not finite. `fetch(first)` is
// what a warp keeps from there on.
struct Measured {
  float norm;
  int64_t nonfinite;
};
template <class W, class Fetch>
__device__ Measured measured(Power power, int count, const Fetch& fetch, Kept<W>& kept) {
  W largest = 0;
  double squares = 0, sum = 0;
  int nonfinite = 0;
  for (int first = 0; first < count; first += kKept) {
    kept = fetch(first);
    Bits<W> most = 0;
    each_kept([&](int g, int k) { most = max(most, magnitude_bits(kept.x[g][k])); });
    const auto add_squares = [&](const auto& size_of) {
      if (power != kMaximum)
        each_kept([&](int g, int k) { sum += double(size_of(kept.x[g][k])) * double(size_of(kept.x[g][k])); });
    };
    if (most < kInfinityBits<W>) {
      largest = max(largest, bit_cast<W>(most));
      add_squares([](W x) { return x; });
    } else {
      const auto size_of = [](W x) { return fabs(x) < infinity<W> ? fabs(x) : W(0); };
      each_kept([&](int g, int k) {
        nonfinite += !(fabs(kept.x[g][k]) < infinity<W>);
        largest = max(largest, size_of(kept.x[g][k]));
      });
      add_squares(size_of);
    }
    if (power == kMaximum) continue;
    if (first + kKept < count && (first + kKept) % kBlock != 0) continue;
    squares += __shfl_sync(kAllLanes, combine_warp(sum), 0);
    sum = 0;
  }
  for (int half = kWarp / 2; half > 0; half /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, half));
  const double most = double(largest);
  return {power == kMaximum ? norm_at_least(most) : norm_from_squares(squares, most), nonfinite};
}

// The records of a unit of work: more where there are several tensors, as a warp looks for theirs first.
__host__ __device__ constexpr int64_t records_at_once(bool several) { return several ? 4 : 1; }

// ---- values -----------------------------------------------------------------------------------------------

// Those of `count` elements of a gradient that a warp keeps from `first` on.
template <class T> __device__ Kept<Work<T>> values_of(const T* x, int count, int first) {
  using W = Work<T>;
  Kept<W> kept;
  const T* mine = x + first + lane_index();
  const int left = count - first - lane_index();
  if (first + kKept <= count)
    each_kept([&](int g, int k) { kept.x[g][k] = to_work(mine[kept_at(g, k)]); });
  else
    each_kept([&](int g, int k) { kept.x[g][k] = kept_at(g, k) < left ? W(to_work(mine[kept_at(g, k)])) : W(0); });
  return kept;
}

// ---- codes ------------------------------------------------------------------------------------------------

// Those of what a warp keeps of a block, a byte each, in shared memory: lanes read and write groups of eight
// neighbours, and use values that are 32 apart.
struct KeptCodes {
  uint64_t of_go[kGoes][kWarp];

  __device__ int32_t operator()(int g, int k) const {
    return reinterpret_cast<const int8_t*>(of_go[g])[k * kWarp + lane_index()];
  }
  __device__ void put(int g, int k, int32_t code) {
    reinterpret_cast<int8_t*>(of_go[g])[k * kWarp + lane_index()] = int8_t(code);
  }
};

// The packed codes of a group of a block that has `groups` of them; 0 behind these.
__device__ inline uint64_t load_packed(const uint8_t* codes, int bits, int group, int groups) {
  if (group >= groups) return 0;
  const bool words = reinterpret_cast<uintptr_t>(codes) % 4 == 0;
  return words ? load_group(codes, bits, group, groups) : load_bytes_of_group(codes + group * bits, bits);
}

// Packed codes of a lane's groups on their way to KeptCodes.
struct PackedCodes {
  uint64_t of_go[kGoes];
};

// Of those of a block that a warp keeps from `first` on, up to `end`, which are whole groups; 0 behind it.
__device__ inline PackedCodes load_kept(const uint8_t* codes, int bits, int first, int end) {
  PackedCodes packed;
#pragma unroll
  for (int g = 0; g < kGoes; ++g)
    packed.of_go[g] = load_packed(codes, bits, (first + g * int(kOfWarp)) / kPacked + lane_index(), end / kPacked);
  return packed;
}
__device__ inline void put_kept(const PackedCodes& packed, const Packing& packing, KeptCodes& into) {
  __syncwarp();  // all lanes have used what was there
#pragma unroll
  for (int g = 0; g < kGoes; ++g) into.of_go[g][lane_index()] = packing.unpack_signed(packed.of_go[g]);
  __syncwarp();
}

// ---- sums -------------------------------------------------------------------------------------------------

// A lane asks for the norm of a part: all of them are under way at once, and so are the divisions by them below.
__device__ inline float largest_norm(const PartList<uint8_t>& parts, int64_t part_count, int64_t at) {
  float largest = 0;
  for (int64_t part = lane_index(); part < part_count; part += kWarp) largest = max(largest, norm_at(parts[part] + at));
  for (int half = kWarp / 2; half > 0; half /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, half));
  return largest;
}

// Sums of eight neighbours each, on their way to values that are 32 apart, in shared memory.
struct alignas(16) FourSums {
  float x[4];
};
struct SumsOfGo {
  FourSums of_lanes[kWarp][kPacked / 4];
};

// Adds eight codes, a byte each that is `half` more than its code, times what they count. With such a byte as its
// lowest one, 2^23 is a number that is more by as much: this takes fewer instructions than a conversion.
__device__ inline void add_eight(float (&sums)[kPacked], uint64_t bytes, float half, float unit) {
  constexpr float kWhole = 8388608;
#pragma unroll
  for (int k = 0; k < kPacked; ++k) {
    const uint32_t four = uint32_t(k < 4 ? bytes : bytes >> 32);
    const float code = bit_cast<float>(bit_cast<uint32_t>(kWhole) | (four >> (8 * (k % 4)) & 0xffu)) - (kWhole + half);
    sums[k] += code * unit;
  }
}

// The sums of group `group` of the records at `at` of all parts, a lane's; a lane finds the unit of a part for all
// others. The codes of several parts are under way at once. `kBits`: 4 or 8 where all parts begin at a multiple of four
// bytes and have codes of so many bits; else 0, for any.
template <int kBits> __device__ void add_parts(const PartList<uint8_t>& parts, int64_t part_count, int64_t at,
                                               const QsgdShape& shape, float power, int group, float (&sums)[kPacked]) {
  constexpr int kAtOnce = 4;
  const Packing packing(kBits > 0 ? kBits : shape.bits);
  const int half = 1 << (shape.bits - 1), groups = int(shape.block) / kPacked;
  const auto codes_of = [&](int64_t part) {
    const uint8_t* codes = parts[part] + at + kNormBytes;
    if constexpr (kBits == 0)
      return load_packed(codes, shape.bits, group, groups);
    else
      return group < groups ? load_group(codes, kBits, group, groups) : 0;
  };
  for (int64_t begin = 0; begin < part_count; begin += kWarp) {
    const int number = int(min(part_count - begin, int64_t(kWarp)));
    const float units = lane_index() < number
                            ? fold_unit(norm_at(parts[begin + lane_index()] + at), power, levels_of(shape.bits))
                            : 0.0f;
#pragma unroll 1
    for (int part = 0; part < number; part += kAtOnce) {
      uint64_t codes[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) codes[i] = codes_of(begin + min(part + i, number - 1));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (part + i >= number) break;
        const uint64_t bytes = kBits == 8 ? codes[i] : packing.unpack(codes[i]);
        add_eight(sums, bytes ^ every(8, 1) * uint64_t(half), float(half), __shfl_sync(kAllLanes, units, part + i));
      }
    }
  }
}

// The sums of the records at `at` of all parts that a warp keeps from `first` on.
template <int kBits> __device__ Kept<float> sums_of(const PartList<uint8_t>& parts, int64_t part_count, int64_t at,
                                                    const QsgdShape& shape, float power, int first, SumsOfGo& room) {
  Kept<float> kept;
#pragma unroll
  for (int g = 0; g < kGoes; ++g) {
    float sums[kPacked] = {};
    add_parts<kBits>(parts, part_count, at, shape, power, (first + g * int(kOfWarp)) / kPacked + lane_index(), sums);
    __syncwarp();  // all lanes have read what was there
    FourSums* mine = room.of_lanes[lane_index()];
    mine[0] = {sums[0], sums[1], sums[2], sums[3]}, mine[1] = {sums[4], sums[5], sums[6], sums[7]};
    __syncwarp();
    const auto* all = reinterpret_cast<const float*>(room.of_lanes) + lane_index();
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) kept.x[g][k] = all[k * kWarp];
  }
  return kept;
}

// Calls run(a constant, see add_parts()); codes have 2 to 8 bits.
template <class Run> void with_bits_of(const uint8_t* const* parts, int64_t part_count, int bits, const Run& run) {
  if (bits % 4 != 0 || !are_words(parts, part_count))
    run(std::integral_constant<int, 0>());
  else if (bits == 4)
    run(std::integral_constant<int, 4>());
  else
    run(std::integral_constant<int, 8>());
}

}  // namespace
}  // namespace hvc
