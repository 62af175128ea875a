// LoCo: QSGD's records of gradients and an average of earlier errors, made and averaged.
#include "rules/loco.h"

#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

struct LocoFold {
  const uint8_t* const* parts;
  int64_t part_count;
  QsgdShape shape;
  ErrorRule rule;
  const uint8_t* kept;
  uint8_t *out, *left;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "loco_body.h"
#include "foreach_isa.h"

namespace hvc {

void loco_encode(const LocoEncoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, int kept_bits,
                 double beta, int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(encode<T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const LocoEncoded& t = tensors[i];
      nonfinite[i] = parallel_sum(
          launch.threads, ceil_div(t.count, shape.block), 8 * t.count * int64_t(sizeof(T)),
          [&](int64_t first, int64_t last) { return range(t, shape, ErrorRule{kept_bits, beta}, first, last); });
    }
  });
}

void loco_fold(const uint8_t* const* parts, int64_t part_count, int64_t blocks, QsgdShape shape, int kept_bits,
               double beta, const uint8_t* kept, uint8_t* out, uint8_t* left, Launch launch) {
  const LocoFold f{parts, part_count, shape, {kept_bits, beta}, kept, out, left};
  const auto range = HVC_CHOOSE(fold);
  parallel_for(launch.threads, blocks, (24 + 4 * part_count) * blocks * shape.block,
               [&](int64_t first, int64_t last) { range(f, first, last); });
}

}  // namespace hvc
