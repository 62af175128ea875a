// Exponential dithering: signs and exponents that merge in a tree.
#include "rules/exponential.h"

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

struct ExponentialFold {
  const uint8_t* const* parts;
  int64_t part_count;
  int32_t headroom;
  const Stream* key;
  int64_t offset;
  uint8_t* out;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "exponential_body.h"
#include "foreach_isa.h"

namespace hvc {

void exponential_encode(const ExponentialEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, int32_t mantissa, const Stream* key, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = bits == 4      ? HVC_CHOOSE(encode<4, 0, T>)
                       : mantissa > 0 ? HVC_CHOOSE(encode<8, kMantissaBits, T>)
                                      : HVC_CHOOSE(encode<8, 0, T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const ExponentialEncoded& t = tensors[i];
      parallel_chunks(t.count, 4 * t.count * int64_t(sizeof(T)), launch.threads,
                      [&](int64_t first, int64_t last) { range(t, headroom, *key, first, last); });
    }
  });
}

void exponential_merge(uint8_t* into, const uint8_t* other, int64_t bytes, int bits, const Stream* key, int64_t offset,
                       Launch launch) {
  const auto range = bits == 4 ? HVC_CHOOSE(merge<4>) : HVC_CHOOSE(merge<8>);
  parallel_chunks(bytes, 16 * bytes, launch.threads,
                  [&](int64_t first, int64_t last) { range(into, other, *key, offset, first, last); });
}

void exponential_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int32_t headroom,
                      int32_t mantissa, const Stream* key, int64_t offset, uint8_t* out, Launch launch) {
  const ExponentialFold f{parts, part_count, headroom, key, offset, out};
  const auto range = mantissa > 0 ? HVC_CHOOSE(fold<kMantissaBits>) : HVC_CHOOSE(fold<0>);
  parallel_chunks(count, (8 + part_count) * count, launch.threads,
                  [&](int64_t first, int64_t last) { range(f, first, last); });
}

void exponential_decode(const ExponentialDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, int32_t mantissa, double scale, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = bits == 4      ? HVC_CHOOSE(decode<4, 0, T>)
                       : mantissa > 0 ? HVC_CHOOSE(decode<8, kMantissaBits, T>)
                                      : HVC_CHOOSE(decode<8, 0, T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const ExponentialDecoded& t = tensors[i];
      parallel_chunks(t.count, 2 * t.count * int64_t(sizeof(T)), launch.threads,
                      [&](int64_t first, int64_t last) { range(t, headroom, scale, first, last); });
    }
  });
}

}  // namespace hvc
