// Exact selection of the largest elements.
//
// One pass collects the candidates beyond a bound that a sample suggests, in index order. A full list is cut down to
// its k largest, which raises the bound: what comes later must be larger, for equals lose against lower indices.
// Where the bound was so high that fewer than k were found, the pass is made again with a lower one. So the sample
// decides about the time and never about the result.
#include "rules/select.h"

#include <cmath>
#include <memory>

#include "kernels.h"
#include "parallel.h"
#include "select_operands.h"
#include "visit.h"

namespace hvc {
namespace {

// Elements that may be among the largest, in index order.
template <class W> struct Candidates {
  W* values;
  int32_t* positions;
  int64_t size, capacity;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "select_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

constexpr int64_t kSampled = 1 << 16;    // elements of a sample, at most
constexpr int64_t kSampledOneIn = 32;    // of so many elements one is sampled, at most
constexpr int64_t kRun = 16;             // consecutive elements of a sample: a cache line
constexpr int64_t kSlack = 64;           // elements after a list that whole vectors may write
constexpr int kDigitBits = 11;           // bits of a key that one histogram resolves
constexpr int64_t kHeldBytes = 1 << 27;  // memory that stays with its thread between calls, at most

// ---- memory -----------------------------------------------------------------------------------------------

// Fresh pages cost more than the selection: a thread keeps its memory.
class Arena {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = 0;  // the next line may throw
      data_.reset(new char[size_t(bytes)]);
      size_ = bytes;
    }
    return data_.get();
  }
  void shrink() {
    if (size_ > kHeldBytes) data_.reset(), size_ = 0;
  }

 private:
  std::unique_ptr<char[]> data_;
  int64_t size_ = 0;
};

// The arena of this thread for one call, which gives back what is too much however it ends.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { arena().shrink(); }

  Arena& arena() const {
    static thread_local Arena held;
    return held;
  }
};

// One part of the tensor: its candidates, and as many keys.
template <class W> struct Part {
  Candidates<W> list;
  Key<W>* keys;
  int64_t nonfinite;
  W above[2];
};

// Values of all parts lie together, and so do keys and positions: lists can be joined in place.
template <class W> std::vector<Part<W>> make_parts(Arena& arena, int64_t number, int64_t capacity) {
  const int64_t room = ceil_div(capacity + kSlack, 16) * 16;
  auto* values = reinterpret_cast<W*>(arena.reserve(number * room * int64_t(2 * sizeof(W) + sizeof(int32_t))));
  auto* keys = reinterpret_cast<Key<W>*>(values + number * room);
  auto* positions = reinterpret_cast<int32_t*>(keys + number * room);
  std::vector<Part<W>> parts;
  for (int64_t at = 0; at < number * room; at += room)
    parts.push_back({{values + at, positions + at, 0, capacity}, keys + at, 0, {}});
  return parts;
}

// ---- the k largest of a list -------------------------------------------------------------------------------

template <class K> int digit_shift(K low, K high) {
  return std::max(0, 64 - __builtin_clzll(uint64_t(high - low)) - kDigitBits);
}

// Finds the k-th largest key, digit by digit from the top; overwrites the keys.
template <class K> Cut<K> find_cut(K* keys, int64_t size, int64_t k) {
  if (size <= k) return {0, 0};
  for (;;) {
    K low = keys[0], high = keys[0];
    for (int64_t i = 1; i < size; ++i) low = std::min(low, keys[i]), high = std::max(high, keys[i]);
    if (low == high) return {low, k};
    const int shift = digit_shift(low, high);
    int64_t counts[1 << kDigitBits] = {};
    for (int64_t i = 0; i < size; ++i) ++counts[K(keys[i] - low) >> shift];
    K digit = K(high - low) >> shift;
    for (; k > counts[digit]; --digit) k -= counts[digit];
    int64_t left = 0;
    for (int64_t i = 0; i < size; ++i) {
      const K key = keys[i];
      keys[left] = key;
      left += K(key - low) >> shift == digit;
    }
    size = left;
  }
}

// The keys of one side; returns their number.
template <int kSides, class W> int64_t keys_of(const Candidates<W>& list, int side, Key<W>* keys) {
  int64_t size = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    keys[size] = key_of(list.values[i]);
    size += side_of<kSides>(list.values[i]) == side;
  }
  return size;
}

// Leaves the k largest of each side, in index order.
template <int kSides, class W> void prune(Candidates<W>& list, int64_t k, Key<W>* keys, W* above) {
  Cut<Key<W>> cuts[2];
  for (int side = 0; side < kSides; ++side) {
    cuts[side] = find_cut(keys, keys_of<kSides>(list, side, keys), k);
    above[side] = std::max(above[side], bit_cast<W>(cuts[side].key));
  }
  int64_t kept = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    const W value = list.values[i];
    const int32_t position = list.positions[i];
    auto& cut = cuts[side_of<kSides>(value)];
    const Key<W> key = key_of(value);
    bool keep = key > cut.key;
    if (__builtin_expect(key == cut.key, 0)) keep = cut.ties-- > 0;
    list.values[kept] = value;
    list.positions[kept] = position;
    kept += keep;
  }
  list.size = kept;
}

// ---- the bound to begin with -------------------------------------------------------------------------------

// Runs of elements, one from every stretch of the tensor, at places that no row length meets in step.
template <class T> void take_sample(const Input<T>& in, Candidates<Work<T>>& list) {
  const int64_t runs = std::min(kSampled, in.count / kSampledOneIn) / kRun;
  list.size = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t stretch = in.count / runs, spread = uint32_t(run * 2654435761u) >> 1;
    const int64_t begin = run * stretch + spread % (stretch - kRun + 1);
    for (int64_t i = begin; i < begin + kRun; ++i) {
      const Work<T> x = in.residual ? Work<T>(to_work(in.grad[i]) + in.residual[i]) : to_work(in.grad[i]);
      list.values[list.size] = x;
      list.size += x > 0 || x < 0;
    }
  }
}

// A bound that `factor` times k elements of that side are expected to pass, and some more for luck. The list holds
// the sample.
template <int kSides, class T> Work<T> suggest(const Input<T>& in, const Part<Work<T>>& part, int side, double factor) {
  const int64_t sampled = std::min(kSampled, in.count / kSampledOneIn);
  const double expected = double(in.k) * double(sampled) / double(std::max<int64_t>(in.count, 1));
  const auto rank = int64_t(factor * expected + 3 * std::sqrt(expected) + 4);
  const int64_t size = keys_of<kSides>(part.list, side, part.keys);
  const auto key = find_cut(part.keys, size, rank).key;
  return bit_cast<Work<T>>(Key<Work<T>>(key - (key != 0)));  // equals pass: they may be all that there is
}

// ---- selection ---------------------------------------------------------------------------------------------

template <int kSides, class T> void sift_part(const Input<T>& in, int64_t first, int64_t last, Part<Work<T>>& part) {
  const auto pass = HVC_CHOOSE(sift<kSides, T>);
  part.list.size = part.nonfinite = 0;
  for (int64_t i = first;;) {
    i = pass(in, part.above, i, last, part.list, part.nonfinite);
    if (i >= last) return;
    prune<kSides>(part.list, in.k, part.keys, part.above);
  }
}

// Brings the candidates of all parts together in the first.
template <class W> void join(std::vector<Part<W>>& parts) {
  Candidates<W>& all = parts[0].list;
  for (size_t i = 1; i < parts.size(); ++i) {
    const Candidates<W>& more = parts[i].list;
    memmove(all.values + all.size, more.values, size_t(more.size) * sizeof(W));
    memmove(all.positions + all.size, more.positions, size_t(more.size) * sizeof(int32_t));
    all.size += more.size;
    parts[0].nonfinite += parts[i].nonfinite;
  }
}

// Lowers the bounds of sides on which fewer than k were found, and empties the list; false, and all stays, if no
// bound could be lower.
template <int kSides, class T> bool lower(const Input<T>& in, Part<Work<T>>& all, Work<T>* bounds, int attempt) {
  int64_t found[2] = {0, 0};
  for (int64_t i = 0; i < all.list.size; ++i) ++found[side_of<kSides>(all.list.values[i])];
  const auto missing = [&](int side) { return found[side] < in.k && bounds[side] > 0; };
  if (!missing(0) && !(kSides == kApart && missing(1))) return false;
  if (attempt == 0) take_sample(in, all.list);
  for (int side = 0; side < kSides; ++side)
    if (missing(side)) bounds[side] = attempt == 0 ? suggest<kSides>(in, all, side, 4.0) : Work<T>(0);
  return true;
}

// The kept elements of the tensor, in the first part.
template <int kSides, class T>
std::vector<Part<Work<T>>> select_largest(const Input<T>& in, Arena& arena, Launch launch) {
  using W = Work<T>;
  const int64_t bytes = in.count * int64_t(sizeof(T) + (in.residual ? sizeof(W) : 0));
  const int64_t number = std::max<int64_t>(1, std::min<int64_t>(launch.threads, bytes / kBytesPerThread));
  // Twice what may stay: so cutting a list down frees as much as it costs.
  const int64_t capacity = std::min(ceil_div(in.count, number) + kLanes, std::max(2 * kSides * in.k, kSampled));
  auto parts = make_parts<W>(arena, number, capacity);
  W bounds[2] = {};
  take_sample(in, parts[0].list);
  for (int side = 0; side < kSides; ++side) bounds[side] = suggest<kSides>(in, parts[0], side, 1.1);
  for (int attempt = 0;; ++attempt) {
    parallel_for(launch.threads, number, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::copy(bounds, bounds + 2, parts[size_t(i)].above);
        sift_part<kSides>(in, in.count * i / number, in.count * (i + 1) / number, parts[size_t(i)]);
      }
    });
    join(parts);
    if (!lower<kSides>(in, parts[0], bounds, attempt)) break;
  }
  prune<kSides>(parts[0].list, in.k, parts[0].keys, parts[0].above);
  return parts;
}

// The sum of magnitudes in the order of rules/tree.h, as one row.
template <class W> double sum_of_keys(const Key<W>* keys, int64_t size) {
  double total = 0;
  for (int64_t unit = 0; unit < size; unit += kSuperblock) {
    double sum = 0;
    for (int64_t block = unit; block < std::min(unit + kSuperblock, size); block += kBlock) {
      double lanes[kLanes] = {};
      const int64_t end = std::min(block + kBlock, size);
      int64_t i = block;
      for (; i + kLanes <= end; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += double(bit_cast<W>(keys[i + lane]));
      for (int lane = 0; i + lane < end; ++lane) lanes[lane] += double(bit_cast<W>(keys[i + lane]));
      sum += combine_lanes(lanes);
    }
    total += sum;
  }
  return total;
}

// Copies the positions of the side that stands for the tensor; returns their number.
template <class W> int64_t take_winner(Part<W>& part, int32_t* positions, W* mean) {
  const Candidates<W>& list = part.list;
  int64_t sizes[2];
  double sums[2];
  for (int side = 0; side < 2; ++side) {
    sizes[side] = keys_of<kApart>(list, side, part.keys);
    sums[side] = sum_of_keys<W>(part.keys, sizes[side]);
  }
  const int winner = negatives_win(sums[0], sizes[0], sums[1], sizes[1]);
  const double average = sizes[winner] == 0 ? 0.0 : sums[winner] / double(sizes[winner]);
  *mean = W(winner ? -average : average);
  int64_t taken = 0;
  for (int64_t i = 0; i < list.size; ++i)
    if (side_of<kApart>(list.values[i]) == winner) positions[taken++] = list.positions[i];
  return taken;
}

void put_numbers(int64_t kept, int64_t nonfinite, int64_t* numbers) {
  numbers[0] = kept;
  numbers[1] = nonfinite;
  numbers[2] = 0;
}

}  // namespace

void top_select(const TopSelected* tensors, int64_t tensor_count, Dtype dtype, bool, Launch launch) {
  const Memory memory;
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (const TopSelected* t = tensors; t != tensors + tensor_count; ++t) {
      const Input<T> in = input<T>(t->grad, t->residual, t->count, t->k);
      const auto parts = select_largest<kTogether>(in, memory.arena(), launch);
      const Candidates<Work<T>>& kept = parts[0].list;
      std::copy(kept.positions, kept.positions + kept.size, t->positions);
      std::copy(kept.values, kept.values + kept.size, static_cast<Work<T>*>(t->values));
      put_numbers(kept.size, parts[0].nonfinite, t->numbers);
    }
  });
}

void binary_select(const BinarySelected* tensors, int64_t tensor_count, Dtype dtype, bool, Launch launch) {
  const Memory memory;
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (const BinarySelected* t = tensors; t != tensors + tensor_count; ++t) {
      auto parts = select_largest<kApart>(input<T>(t->grad, t->residual, t->count, t->k), memory.arena(), launch);
      auto* const mean = static_cast<Work<T>*>(t->mean);
      put_numbers(take_winner(parts[0], t->positions, mean), parts[0].nonfinite, t->numbers);
    }
  });
}

}  // namespace hvc
