// QSGD with Elias codes: sections of norms and streams, written, and decoded and added up.
#include "rules/elias.h"

#include <memory>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct EliasEncode {
  const T* grad;
  int64_t count;
  QsgdShape shape;
  double error;
  const Stream* key;
  int64_t offset;
  uint8_t* section;
};

// What a thread wrote: the first one behind the norms, the others into room of their own.
struct EliasShare {
  std::unique_ptr<uint8_t[]> room;
  int64_t bytes = 0, nonfinite = 0;
};

template <class T> struct EliasDecode {
  const Section* sections;
  int64_t number, count;
  QsgdShape shape;
  double scale;
  T* grad;
  bool streamed;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "elias_body.h"
#include "foreach_isa.h"

namespace hvc {

void elias_encode(const void* grad, Dtype dtype, int64_t count, QsgdShape shape, double error, const Stream* key,
                  int64_t offset, int64_t* place, uint8_t* out, int64_t, int64_t* nonfinite, Launch launch) {
  *nonfinite = 0;
  if (place[0] < 0) return put_end(-1, place);
  const int64_t ranges = elias_ranges(count, shape.block), in_range = blocks_in_range(shape.block) * shape.block;
  const int64_t most = ceil_div((2 * shape.bits - 1) * in_range, 8);  // bytes of a stream
  uint8_t* const section = out + place[0];
  uint8_t* const streams = section + 4 * ranges + ceil_div(count, shape.block) * kNormBytes;
  std::vector<EliasShare> shares(size_t(std::max(launch.threads, 1)));
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const EliasEncode<T> e{static_cast<const T*>(grad), count, shape, error, key, offset, section};
    const auto encode = HVC_CHOOSE(encode<T>);
    parallel_ranges(launch.threads, ranges, 2 * count * int64_t(sizeof(T)),
                    [&](int64_t i, int64_t first, int64_t last) {
                      EliasShare& share = shares[size_t(i)];
                      if (i > 0) share.room.reset(new uint8_t[size_t((last - first) * most)]);
                      share.bytes = encode(e, first, last, i > 0 ? share.room.get() : streams, share.nonfinite);
                    });
  });
  int64_t used = streams - section;
  for (const EliasShare& share : shares) {
    if (share.room) memcpy(section + used, share.room.get(), size_t(share.bytes));
    used += share.bytes;
    *nonfinite += share.nonfinite;
  }
  put_end(used, place);
}

void elias_decode(const Section* sections, int64_t section_count, Dtype dtype, int64_t count, QsgdShape shape,
                  double scale, void* grad, int64_t* wrong, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t bytes = count * int64_t(sizeof(T));
    const EliasDecode<T> d{sections, section_count, count, shape, scale, static_cast<T*>(grad), streams(bytes)};
    const auto decode = HVC_CHOOSE(decode<T>);
    *wrong = parallel_sum(launch.threads, elias_ranges(count, shape.block), 4 * bytes,
                          [&](int64_t first, int64_t last) { return decode(d, first, last); });
  });
}

}  // namespace hvc
