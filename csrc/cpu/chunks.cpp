// The largest elements of every chunk of a tensor.
#include "rules/chunks.h"

#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "select_operands.h"
#include "visit.h"

#define HVC_BODY "chunks_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

// Brings what the chunks have kept together; returns how much that is.
template <class W> int64_t join(const ChunkShape& s, const std::vector<int32_t>& kept, int32_t* positions, W* values) {
  int64_t size = 0;
  for (int64_t index = 0; index < int64_t(kept.size()); ++index) {
    const int64_t from = index * s.k, number = kept[size_t(index)];
    if (from != size) {
      std::copy(positions + from, positions + from + number, positions + size);
      std::copy(values + from, values + from + number, values + size);
    }
    size += number;
  }
  return size;
}

void select_of(const ChunkSelected& t, Dtype dtype, int64_t chunk, int64_t k, Launch launch) {
  const ChunkShape s{t.count, chunk, k, t.last};
  std::vector<int32_t> kept(size_t(number_of_chunks(s)));
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Input<T> in = input<T>(t.grad, t.residual, t.count, k);
    const auto range = HVC_CHOOSE(select_chunks<T>);
    auto* const into = static_cast<W*>(t.values);
    const int64_t bytes = t.count * int64_t(sizeof(T) + (t.residual ? sizeof(W) : 0));
    t.numbers[1] = parallel_sum(launch.threads, int64_t(kept.size()), bytes, [&](int64_t first, int64_t end) {
      return range(in, s, t.positions, into, kept.data(), first, end);
    });
    t.numbers[0] = join(s, kept, t.positions, into);
    t.numbers[2] = 0;
  });
}

}  // namespace

void chunk_select(const ChunkSelected* tensors, int64_t tensor_count, Dtype dtype, int64_t chunk, int64_t k,
                  Launch launch) {
  for (int64_t i = 0; i < tensor_count; ++i) select_of(tensors[i], dtype, chunk, k, launch);
}

}  // namespace hvc
