// The union of what ranks have: its bits, the values in it, and results made of these.
#include "rules/union.h"

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#define HVC_BODY "union_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

// Returns the sum of what body(first, last) returns for shares of the elements, each from the beginning of a word on.
template <class Body> int64_t sum_of_shares(Launch launch, int64_t count, int64_t block, int64_t bytes, Body body) {
  const int64_t step = kWordBits * block;
  return parallel_sum(launch.threads, ceil_div(count, step), bytes,
                      [&](int64_t first, int64_t last) { return body(first * step, std::min(last * step, count)); });
}

// The same for what is told of the place of a share's first value. It is counted anew for each: bits are few.
template <class Tensor, class Body>
void each_share(const Tensor& t, Launch launch, int64_t block, int64_t size, const Body& body) {
  const auto before = HVC_CHOOSE(elements_in);
  sum_of_shares(launch, t.count, block, (t.count + t.kept) * size, [&](int64_t first, int64_t last) {
    body(before(t.bits, t.count, block, 0, first / (kWordBits * block)), first, last);
    return 0;
  });
}

}  // namespace

void union_mark(const UnionMarked* tensors, int64_t tensor_count, Dtype dtype, int64_t block, int64_t* nonfinite,
                Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(mark<T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const UnionMarked& t = tensors[i];
      nonfinite[i] = sum_of_shares(launch, t.count, block, t.count * int64_t(sizeof(T)),
                                   [&](int64_t first, int64_t last) { return range(t, block, first, last); });
    }
  });
}

void union_count(const UnionCounted* tensors, int64_t tensor_count, int64_t block, int64_t* kept, Launch launch) {
  const auto range = HVC_CHOOSE(elements_in);
  for (int64_t i = 0; i < tensor_count; ++i) {
    const UnionCounted& t = tensors[i];
    const int64_t words = words_for(ceil_div(t.elements, block));
    kept[i] = parallel_sum(launch.threads, words, 8 * words,
                           [&](int64_t first, int64_t last) { return range(t.bits, t.elements, block, first, last); });
  }
}

void union_encode(const UnionEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t block, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Dtype work = dtype == kFloat64 ? kFloat64 : kFloat32;
    const auto range = HVC_CHOOSE(encode<T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const UnionEncoded& t = tensors[i];
      const DenseOffered all{t.grad, nullptr, t.count, t.values};
      int64_t nonfinite;
      if (!t.bits)
        dense_offer(&all, 1, dtype, work, work, &nonfinite, launch);
      else
        each_share(t, launch, block, sizeof(T),
                   [&](int64_t place, int64_t first, int64_t last) { range(t, block, place, first, last); });
    }
  });
}

void union_decode(const UnionDecoded* tensors, int64_t tensor_count, Dtype dtype, int64_t block, double scale,
                  Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Dtype work = dtype == kFloat64 ? kFloat64 : kFloat32;
    const auto range = HVC_CHOOSE(decode<T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const UnionDecoded& t = tensors[i];
      const DenseDecoded all{t.values, t.count, t.grad, nullptr};
      const bool streamed = streams(t.count * int64_t(sizeof(T)));
      if (!t.bits)
        dense_decode(&all, 1, work, dtype, work, scale, launch);
      else
        each_share(t, launch, block, sizeof(T), [&](int64_t place, int64_t first, int64_t last) {
          range(t, block, Work<T>(scale), streamed, place, first, last);
        });
    }
  });
}

}  // namespace hvc
