// QSGD with packed codes: records of a norm and codes, made, averaged and decoded.
#include "rules/qsgd.h"

#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

struct QsgdFold {
  const uint8_t* const* parts;
  int64_t part_count;
  QsgdShape shape;
  const Stream* key;
  int64_t offset;
  uint8_t* out;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "qsgd_body.h"
#include "foreach_isa.h"

namespace hvc {

void qsgd_encode(const QsgdEncoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, const Stream* key,
                 int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(encode<T>);
    const Stream stream = draws_of(key);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const QsgdEncoded& t = tensors[i];
      nonfinite[i] = parallel_sum(launch.threads, ceil_div(t.count, shape.block), 4 * t.count * int64_t(sizeof(T)),
                                  [&](int64_t first, int64_t last) { return range(t, shape, stream, first, last); });
    }
  });
}

void qsgd_fold(const uint8_t* const* parts, int64_t part_count, int64_t blocks, QsgdShape shape, const Stream* key,
               int64_t offset, uint8_t* out, Launch launch) {
  const QsgdFold f{parts, part_count, shape, key, offset, out};
  const auto range = HVC_CHOOSE(fold);
  parallel_for(launch.threads, blocks, (16 + 4 * part_count) * blocks * shape.block,
               [&](int64_t first, int64_t last) { range(f, first, last); });
}

void qsgd_decode(const QsgdDecoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, double scale,
                 Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(decode<T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const QsgdDecoded& t = tensors[i];
      parallel_for(launch.threads, ceil_div(t.count, shape.block), 2 * t.count * int64_t(sizeof(T)),
                   [&](int64_t first, int64_t last) { range(t, shape, scale, first, last); });
    }
  });
}

}  // namespace hvc
