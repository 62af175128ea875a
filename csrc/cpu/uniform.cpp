// Standard dithering: integers that add.
#include "rules/uniform.h"

#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

struct LevelRule {
  int bits;
  int32_t levels;
  const Stream* key;
};

struct UniformFold {
  const uint8_t* const* parts;
  int64_t part_count;
  int bits, sum_bits;
  uint8_t* out;
};

constexpr int kAnyBits = 0;  // packed, in the number of bits that the call says
}  // namespace
}  // namespace hvc

#define HVC_BODY "uniform_body.h"
#include "foreach_isa.h"

namespace hvc {

void uniform_encode(const UniformEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits, int32_t levels,
                    const Stream* key, Launch launch) {
  const Stream stream = draws_of(key);
  const LevelRule rule{bits, levels, &stream};
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = bits == 4    ? HVC_CHOOSE(encode<4, T>)
                       : bits == 8  ? HVC_CHOOSE(encode<8, T>)
                       : bits == 16 ? HVC_CHOOSE(encode<16, T>)
                                    : HVC_CHOOSE(encode<kAnyBits, T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const UniformEncoded& t = tensors[i];
      parallel_chunks(t.count, 4 * t.count * int64_t(sizeof(T)), launch.threads,
                      [&](int64_t first, int64_t last) { range(t, rule, first, last); });
    }
  });
}

void uniform_add(void* into, const void* other, int64_t count, int bits, Launch launch) {
  const auto bytes = bits == 4 ? HVC_CHOOSE(add_packed) : HVC_CHOOSE(add_bytes);
  const auto shorts = HVC_CHOOSE(add_shorts);
  parallel_for(launch.threads, count, 3 * count * (bits == 16 ? 2 : 1), [&](int64_t first, int64_t last) {
    if (bits == 16)
      shorts(static_cast<uint16_t*>(into), static_cast<const uint16_t*>(other), first, last);
    else
      bytes(static_cast<uint8_t*>(into), static_cast<const uint8_t*>(other), first, last);
  });
}

void uniform_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int bits, int sum_bits, uint8_t* out,
                  Launch launch) {
  const UniformFold f{parts, part_count, bits, sum_bits, out};
  const auto range = HVC_CHOOSE(fold);
  parallel_chunks(count, (2 + 2 * part_count) * count, launch.threads,
                  [&](int64_t first, int64_t last) { range(f, first, last); });
}

void uniform_decode(const UniformDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits, double scale,
                    Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = bits == 4    ? HVC_CHOOSE(decode<4, T>)
                       : bits == 8  ? HVC_CHOOSE(decode<8, T>)
                       : bits == 16 ? HVC_CHOOSE(decode<16, T>)
                                    : HVC_CHOOSE(decode<kAnyBits, T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const UniformDecoded& t = tensors[i];
      parallel_chunks(t.count, 2 * t.count * int64_t(sizeof(T)), launch.threads,
                      [&](int64_t first, int64_t last) { range(t, bits, scale, first, last); });
    }
  });
}

}  // namespace hvc
