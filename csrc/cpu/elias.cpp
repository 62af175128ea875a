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
  uint8_t* out;
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
                  int64_t offset, int64_t* place, uint8_t* out, int64_t, int64_t* nonfinite, Launch) {
  const DefaultRounding rounding;
  int64_t used = -1;
  *nonfinite = 0;
  if (place[0] < 0) return put_end(used, place);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const EliasEncode<T> e{static_cast<const T*>(grad), count, shape, error, key, offset, out + place[0]};
    used = HVC_CHOOSE(encode<T>)(e, *nonfinite);
  });
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
