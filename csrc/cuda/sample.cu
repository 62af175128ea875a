// Samples that all ranks draw alike: offered and decoded.
#include "rules/sample.h"

#include "in_rows.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- helpers ----------------------------------------------------------------------------------------------

// Where a value belongs, and how many units its group has.
struct Choice {
  int64_t place, size;
};

__device__ Choice choice_of(const Sampling& s, int64_t value) {
  const int64_t index = s.block == 1 ? value : value / s.block;
  const DrawnBlocks group = blocks_from(units_of(s), s.k, index);
  const int64_t number = s.first + index;
  const Counter r = sample_draws(s.key, uint64_t(number / kDrawsPerSampleGroup));
  const int word = int(number % kDrawsPerSampleGroup);
  const uint32_t draw = word < 2 ? (word == 0 ? r.c0 : r.c1) : (word == 2 ? r.c2 : r.c3);
  return {(group.begin + chosen_of(draw, group.size)) * s.block + value - index * s.block, group.size};
}

// ---- kernels ----------------------------------------------------------------------------------------------

template <class T>
__global__ void nonfinite_kernel(const T* grad, const Work<T>* residual, int64_t count, int64_t* nonfinite) {
  int64_t bad = 0;
  each_go_of(count, [&](const auto& go) {
    each_of_go(
        go, [&](int64_t i, NoRows) { return offered(grad, residual, i); },
        [&](const Place&, Work<T> x, NoRows) { bad += !is_finite(x); });
  });
  add_count(nonfinite, bad);
}

template <class T> __global__ void choose_kernel(Sampling s, const T* grad, const Work<T>* residual, Work<T>* values) {
  for (int64_t i = first_item(); i < s.k * s.block; i += item_stride()) {
    const int64_t place = choice_of(s, i).place;
    values[i] = place < s.count ? offered(grad, residual, place) : Work<T>(0);
  }
}

template <class T> __global__ void settle_kernel(T* grad, Work<T>* residual, int64_t count) {
  if (residual == nullptr) {
    each_go_of(count, [&](const auto& go) {
      each_of_go(
          go, [](int64_t, NoRows) { return Nothing(); },
          [&](const Place& place, Nothing, NoRows) { grad[place.i] = T{}; });
    });
    return;
  }
  each_go_of(count, [&](const auto& go) {
    each_of_go(
        go, [&](int64_t i, NoRows) { return to_work(grad[i]) + residual[i]; },
        [&](const Place& place, Work<T> x, NoRows) {
          residual[place.i] = x;
          grad[place.i] = T{};
        });
  });
}

template <class T> __global__ void place_kernel(Sampling s, const Work<T>* values, Work<T> scale, bool weighted,
                                                T* grad, Work<T>* residual) {
  using W = Work<T>;
  for (int64_t i = first_item(); i < s.k * s.block; i += item_stride()) {
    const Choice choice = choice_of(s, i);
    if (choice.place >= s.count) continue;
    const W value = weighted ? W(values[i] * W(choice.size)) : values[i];
    grad[choice.place] = from_work<T>(W(value * scale));
    if (residual) residual[choice.place] = 0;
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void sample_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t block, int64_t k,
                  const Stream* key, int64_t first, void* values, int64_t* nonfinite, Launch launch) {
  const Sampling s{count, k, *key, first, block};
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* x = static_cast<const T*>(grad);
    const auto* kept = static_cast<const Work<T>*>(residual);
    start(nonfinite_kernel<T>, units_of_goes(count) * kWarp, launch, x, kept, count, nonfinite);
    start(choose_kernel<T>, k * block, launch, s, x, kept, static_cast<Work<T>*>(values));
  });
}

void sample_decode(const void* values, Dtype dtype, int64_t count, int64_t block, int64_t k, const Stream* key,
                   int64_t first, double scale, bool weighted, void* grad, void* residual, Launch launch) {
  const Sampling s{count, k, *key, first, block};
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    T* out = static_cast<T*>(grad);
    W* kept = static_cast<W*>(residual);
    start(settle_kernel<T>, units_of_goes(count) * kWarp, launch, out, kept, count);
    start(place_kernel<T>, k * block, launch, s, static_cast<const W*>(values), W(scale), weighted, out, kept);
  });
}

}  // namespace hvc
