// Standard dithering: integers that add.
#include "hvc/level.h"

#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct LevelEncode {
  const T* grad;
  const Work<T>* norms;
  const Work<T>* bounds;
  int64_t row_length;
  int32_t levels;
  const Stream* key;
  int64_t offset;
  void* codes;
};

template <class T> struct LevelDecode {
  const void* codes;
  const Work<T>* norms;
  int64_t row_length;
  double scale;
  T* grad;
  bool streamed;
};

constexpr int64_t kShare = 256;  // threads take whole chunks: what is drawn and packed together

}  // namespace
}  // namespace hvc

#define HVC_BODY "level_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

// Runs body(first element, last element) on shares of [0, count).
template <class Body> void share(int64_t count, int64_t bytes, int threads, const Body& body) {
  parallel_for(threads, ceil_div(count, kShare), bytes,
               [&](int64_t, int64_t first, int64_t last) { body(first * kShare, std::min(last * kShare, count)); });
}

}  // namespace

void level_encode(const void* grad, const void* norms, const void* bounds, Dtype dtype, int64_t count,
                  int64_t row_length, int bits, int32_t levels, const Stream* key, int64_t offset, void* codes,
                  Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const LevelEncode<T> e{static_cast<const T*>(grad),
                           static_cast<const W*>(norms),
                           static_cast<const W*>(bounds),
                           row_length,
                           levels,
                           key,
                           offset,
                           codes};
    const auto range = bits == 4   ? HVC_CHOOSE(encode<4, T>)
                       : bits == 8 ? HVC_CHOOSE(encode<8, T>)
                                   : HVC_CHOOSE(encode<16, T>);
    share(count, 4 * count * int64_t(sizeof(T)), launch.threads,
          [&](int64_t first, int64_t last) { range(e, first, last); });
  });
}

void level_add(void* into, const void* other, int64_t count, int bits, Launch launch) {
  const auto bytes = bits == 4 ? HVC_CHOOSE(add_packed) : HVC_CHOOSE(add_bytes);
  const auto shorts = HVC_CHOOSE(add_shorts);
  parallel_for(launch.threads, count, 3 * count * (bits == 16 ? 2 : 1), [&](int64_t, int64_t first, int64_t last) {
    if (bits == 16)
      shorts(static_cast<uint16_t*>(into), static_cast<const uint16_t*>(other), first, last);
    else
      bytes(static_cast<uint8_t*>(into), static_cast<const uint8_t*>(other), first, last);
  });
}

void level_decode(const void* codes, const void* norms, int64_t count, int64_t row_length, int bits, double scale,
                  void* grad, Dtype dtype, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t bytes = count * int64_t(sizeof(T));
    const LevelDecode<T> d{codes,         static_cast<const Work<T>*>(norms), row_length, scale, static_cast<T*>(grad),
                           streams(bytes)};
    const auto range = bits == 4   ? HVC_CHOOSE(decode<4, T>)
                       : bits == 8 ? HVC_CHOOSE(decode<8, T>)
                                   : HVC_CHOOSE(decode<16, T>);
    share(count, 2 * bytes, launch.threads, [&](int64_t first, int64_t last) { range(d, first, last); });
  });
}

void level_encode_all(const LevelEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits, int32_t levels,
                      const Stream* key, Launch launch) {
  for (int64_t i = 0; i < tensor_count; ++i) {
    const LevelEncoded& t = tensors[i];
    level_encode(t.grad, t.norms, t.bounds, dtype, t.count, t.row_length, bits, levels, key, t.offset, t.codes, launch);
  }
}

void level_decode_all(const LevelDecoded* tensors, int64_t tensor_count, int bits, double scale, Dtype dtype,
                      Launch launch) {
  for (int64_t i = 0; i < tensor_count; ++i) {
    const LevelDecoded& t = tensors[i];
    level_decode(t.codes, t.norms, t.count, t.row_length, bits, scale, t.grad, dtype, launch);
  }
}

}  // namespace hvc
