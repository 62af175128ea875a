// Standard dithering: integers that add.
#include "hvc/level.h"

#include "dither.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct LevelEncode {
  const T* grad;
  const Work<T>* norms;
  const Work<T>* bounds;
  int64_t count, row_length;
  int bits;
  int32_t levels;
  Stream key;
  int64_t offset;
  void* codes;
};

template <class T> struct LevelDecode {
  const void* codes;
  const Work<T>* norms;
  int64_t count, row_length;
  int bits;
  double scale;
  T* grad;
};

// ---- kernels ----------------------------------------------------------------------------------------------

template <class T> __global__ void encode_kernel(LevelEncode<T> e) {
  const float most = level_limit(e.levels);
  each_drawn(e.key, e.offset, e.count, [&](int64_t i, uint32_t random) {
    const int64_t row = i / e.row_length;
    const Scaling<Work<T>> scaling = scaling_for(e.norms[row], Work<T>(most));
    const float limit = e.bounds ? bounded_limit(most, e.bounds[row], scaling) : most;
    const int32_t code = level_of(scaled(Work<T>(to_work(e.grad[i])), scaling), limit, random);
    if (e.bits == 4)
      put_nibble(static_cast<uint8_t*>(e.codes), i, uint32_t(code));
    else if (e.bits == 8)
      static_cast<int8_t*>(e.codes)[i] = int8_t(code);
    else
      static_cast<int16_t*>(e.codes)[i] = int16_t(code);
  });
}

__global__ void add_kernel(void* into, const void* other, int64_t count, int bits) {
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    if (bits == 16) {
      auto* sums = static_cast<uint16_t*>(into);
      sums[i] = uint16_t(sums[i] + static_cast<const uint16_t*>(other)[i]);
    } else {
      auto* sums = static_cast<uint8_t*>(into);
      const uint8_t more = static_cast<const uint8_t*>(other)[i];
      sums[i] = bits == 4 ? add_nibbles(sums[i], more) : uint8_t(sums[i] + more);
    }
  }
}

__device__ inline int32_t code_at(const void* codes, int64_t i, int bits) {
  if (bits == 16) return static_cast<const int16_t*>(codes)[i];
  if (bits == 8) return static_cast<const int8_t*>(codes)[i];
  const uint8_t both = static_cast<const uint8_t*>(codes)[i / 2];
  return i % 2 != 0 ? odd_nibble(both) : even_nibble(both);
}

template <class T> __global__ void decode_kernel(LevelDecode<T> d) {
  using W = Work<T>;
  for (int64_t i = first_item(); i < d.count; i += item_stride())
    d.grad[i] = from_work<T>(level_value(code_at(d.codes, i, d.bits), W(d.scale), d.norms[i / d.row_length]));
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void level_encode(const void* grad, const void* norms, const void* bounds, Dtype dtype, int64_t count,
                  int64_t row_length, int bits, int32_t levels, const Stream* key, int64_t offset, void* codes,
                  Launch launch) {
  const Groups groups = groups_of(offset, count);
  if (count == 0) return;
  if (bits == 4) clear(codes, (count + 1) / 2, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const LevelEncode<T> e{static_cast<const T*>(grad), static_cast<const W*>(norms), static_cast<const W*>(bounds),
                           count, row_length, bits, levels, *key, offset, codes};
    start(encode_kernel<T>, groups.last - groups.first, launch, e);
  });
}

void level_add(void* into, const void* other, int64_t count, int bits, Launch launch) {
  start(add_kernel, count, launch, into, other, count, bits);
}

void level_decode(const void* codes, const void* norms, int64_t count, int64_t row_length, int bits, double scale,
                  void* grad, Dtype dtype, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const LevelDecode<T> d{codes, static_cast<const Work<T>*>(norms), count, row_length, bits, scale,
                           static_cast<T*>(grad)};
    start(decode_kernel<T>, count, launch, d);
  });
}

}  // namespace hvc
