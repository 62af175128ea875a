// The union of what ranks have: its bits, the values in it, and results made of these.
#include "rules/union.h"

#include <vector>

#include "rows.h"
#include "scan.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

// Writes a warp's bits, one of each lane, from element `first` on: where blocks are longer, into cleared memory.
__device__ void put_marks(const UnionMarked& t, int64_t block, int64_t first, bool some) {
  auto* const halves = reinterpret_cast<uint32_t*>(t.bits);
  const uint32_t marked = __ballot_sync(kAllLanes, some);
  if (block == 1) {
    if (lane_index() == 0 && first < words_for(t.count) * kWordBits) halves[first / kWarp] = marked;
    return;
  }
  // Of those of a block, the first lane tells.
  const int64_t i = first + lane_index(), number = row_of(i, block, t.count), inside = i - number * block;
  const int begin = int(max(lane_index() - inside, int64_t(0)));
  const uint64_t earlier = marked & bits_below(lane_index()) & ~bits_below(begin);
  if (some && earlier == 0) atomicOr(halves + number / kWarp, 1u << (number % kWarp));
}

template <class T, class Table>
__global__ void mark_kernel(const __grid_constant__ Table table, int64_t block, int64_t* nonfinite) {
  constexpr int64_t kMost = in_one_go(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const UnionMarked& t = table.items[item];
    const int64_t begin = (unit - table.begins[item]) * kMost, end = min(begin + kMost, t.count);
    int64_t bad = 0;
    for (int64_t first = begin; first < end; first += kInFlight * kWarp) {
      const Loaded<T> loaded = load_groups<T>(static_cast<const T*>(t.grad), nullptr, first, t.count);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        bad += !is_finite(loaded.x[k]);
        put_marks(t, block, first + k * kWarp, loaded.x[k] != 0);
      }
    }
    add_count(nonfinite + item, bad);
  }
}

// Of a tensor, and how many bits of each word are 1; or not, where nobody asks.
struct Words {
  const uint64_t* bits;
  int64_t elements, count;
  int64_t* ones;
};

template <class Table> __global__ void count_kernel(const __grid_constant__ Table table, int64_t block, int64_t* kept) {
  constexpr int64_t kMost = in_one_go(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Words& t = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost;
    int64_t sum = 0;
    each_loaded(
        first, min(first + kMost, t.count), [&](int64_t word) { return t.bits[word]; },
        [&](int64_t word, uint64_t bits) {
          if (t.ones) t.ones[word] = ones_of(bits);
          sum += elements_of(bits, word, t.elements, block);
        });
    sum = combine_warp(sum);
    if (kept && lane_index() == 0) add_count(kept + item, sum);
  }
}

// A tensor, and how many bits come before each of its words, counted from any word on.
template <class Tensor> struct InUnion {
  Tensor tensor;
  const int64_t* before;
  int64_t count;

  // Where in the values element i is, or -1.
  __device__ int64_t place_of(int64_t i, int64_t block) const {
    if (!tensor.bits) return i;
    const int64_t number = block == 1 ? i : row_of(i, block, count), word = number / kWordBits, at = number % kWordBits;
    const uint64_t bits = tensor.bits[word];
    const int64_t earlier = before[word] - before[0] + ones_of(bits & bits_below(at));
    const int64_t place = earlier * block + i - number * block;
    return (bits >> at & 1) != 0 && place < tensor.kept ? place : -1;
  }
};

template <class T> struct Placed {
  int64_t place;
  T value;
};

template <class T, class Table> __global__ void encode_kernel(const __grid_constant__ Table table, int64_t block) {
  each_loaded_of(
      table,
      [&](const auto& t, int64_t i) {
        const int64_t place = t.place_of(i, block);
        return Placed<T>{place, place >= 0 ? static_cast<const T*>(t.tensor.grad)[i] : T{}};
      },
      [](const auto& t, int64_t, const Placed<T>& x) {
        if (x.place >= 0) static_cast<Work<T>*>(t.tensor.values)[x.place] = to_work(x.value);
      });
}

template <class T, class Table>
__global__ void decode_kernel(const __grid_constant__ Table table, int64_t block, Work<T> factor) {
  each_loaded_of(
      table,
      [&](const auto& t, int64_t i) {
        const int64_t place = t.place_of(i, block);
        return place >= 0 ? static_cast<const Work<T>*>(t.tensor.values)[place] * factor : Work<T>(0);
      },
      [](const auto& t, int64_t i, Work<T> value) { static_cast<T*>(t.tensor.grad)[i] = from_work<T>(value); });
}

// ---- launchers --------------------------------------------------------------------------------------------

int64_t words_of(int64_t elements, int64_t block) { return words_for(ceil_div(elements, block)); }

// Counts the ones of tensors' words; words_at(i) says which.
template <class WordsAt>
void count_words(int64_t number, WordsAt words_at, int64_t block, int64_t* kept, Launch launch) {
  const auto units = [&](int64_t i) { return ceil_div(words_at(i).count, in_one_go(number > 1)); };
  in_tables<Words>(number, words_at, units, [&](const auto& table, int64_t first) {
    start(count_kernel<std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, block,
          kept ? kept + first : nullptr);
  });
}

// Calls run(table) with tensors that know how many bits come before each of their words.
template <class Tensor, class Run>
void in_union(const Tensor* tensors, int64_t number, int64_t block, Launch launch, const Run& run) {
  std::vector<int64_t> firsts(size_t(number) + 1);
  for (int64_t i = 0; i < number; ++i)
    firsts[size_t(i) + 1] = firsts[size_t(i)] + (tensors[i].bits ? words_of(tensors[i].count, block) : 0);
  const Scratch<int64_t> before(firsts.back(), launch);
  const auto words_at = [&](int64_t i) {
    const int64_t first = firsts[size_t(i)];
    return Words{tensors[i].bits, tensors[i].count, firsts[size_t(i) + 1] - first, before.get() + first};
  };
  count_words(number, words_at, block, nullptr, launch);
  prefix_sums(before.get(), before.get(), firsts.back(), launch);
  in_tables<InUnion<Tensor>>(
      number, [&](int64_t i) { return InUnion<Tensor>{tensors[i], words_at(i).ones, tensors[i].count}; },
      units_in_one_go(tensors, number), [&](const auto& table, int64_t) { run(table); });
}

}  // namespace

void union_mark(const UnionMarked* tensors, int64_t tensor_count, Dtype dtype, int64_t block, int64_t* nonfinite,
                Launch launch) {
  if (block > 1) {
    clear_all(
        tensor_count, [&](int64_t i) { return tensors[i].bits; },
        [&](int64_t i) { return 8 * words_of(tensors[i].count, block); }, launch);
  }
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_tables_of(tensors, tensor_count, units_in_one_go(tensors, tensor_count), [&](const auto& table, int64_t first) {
      start(mark_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, block,
            nonfinite + first);
    });
  });
}

void union_count(const UnionCounted* tensors, int64_t tensor_count, int64_t block, int64_t* kept, Launch launch) {
  const auto words_at = [&](int64_t i) {
    return Words{tensors[i].bits, tensors[i].elements, words_of(tensors[i].elements, block), nullptr};
  };
  count_words(tensor_count, words_at, block, kept, launch);
}

void union_encode(const UnionEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t block, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_union(tensors, tensor_count, block, launch, [&](const auto& table) {
      start(encode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, block);
    });
  });
}

void union_decode(const UnionDecoded* tensors, int64_t tensor_count, Dtype dtype, int64_t block, double scale,
                  Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    in_union(tensors, tensor_count, block, launch, [&](const auto& table) {
      start(decode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, block,
            Work<T>(scale));
    });
  });
}

}  // namespace hvc
