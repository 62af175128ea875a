// Sections of several ranks: each range of each becomes a list, all at the same time; then blocks add the lists in the
// ranks' order, piece by piece of the tensor, and write the result. All tensors of a bucket take one launch of each.
#pragma once
#include "rules/dense.h"
#include "rules/golomb.h"
#include "grid.h"
#include "rows.h"
#include "scan.h"
#include "table.h"

namespace hvc {
namespace {

// What a section says of one element of a range.
template <class W> struct Entry {
  int32_t at;  // counts from the range's beginning
  W value;
};

// How a tensor is cut into ranges, the same for all of its sections.
struct Cut {
  int64_t count, elements, number;  // `elements`: of a whole range

  __device__ int64_t begin(int64_t range) const { return range * elements; }
  __device__ int64_t end(int64_t range) const { return min((range + 1) * elements, count); }
};

// What a tensor's sections look like: the bytes before the ranges, the fewest bits of an entry, and what else a method
// has to know of them.
struct Form {
  int64_t head, bits, values, parameter;
};
inline int64_t room_by_bytes(const Section& section, const Form& form) {
  return 8 * (section.bytes - form.head) / form.bits;
}
inline int64_t room_of(const Section& section, int64_t count, const Form& form) {
  return std::min(room_by_bytes(section, form), count);
}

// A tensor: what its sections look like, and where their sums go. `sums` and `senders` are only in memory where the
// sections are taken in several rounds; `residual` is only in one of these: that of the own section.
template <class T> struct Summed {
  using W = Work<T>;
  Cut cut;
  Form form;
  T* grad;
  W *residual, *momentum, *sums;
  uint16_t* senders;
  int64_t* wrong;
  int64_t first_part, parts, own;  // its parts of the round; which of them is the own section, or -1
  int64_t first_range;
  int32_t begins, ends;  // whether this is the first round, and the last one

  __device__ int64_t range_of(int64_t part, int64_t range) const { return first_range + part * cut.number + range; }
};

// The list of a range among all entries.
struct List {
  int64_t first, size;
};

// A section, and where the lists of its ranges are. They lie as far apart as their bytes in the section, of which an
// entry takes a few bits at least; where that is more than there are elements, as far as the ranges in the tensor.
struct Part {
  Section section;
  int64_t lists;
  bool by_bytes;
};

// What is found of the parts of all tensors, in the device's memory.
template <class W> struct Lists {
  Part* parts;
  int64_t* offsets;
  Entry<W>* entries;
  List* lists;

  template <class T> __device__ const Section& section(const Summed<T>& t, int64_t part) const {
    return parts[t.first_part + part].section;
  }
  template <class T> __device__ int64_t first_entry(const Summed<T>& t, int64_t part, int64_t range) const {
    const Part& p = parts[t.first_part + part];
    return p.lists + (p.by_bytes ? 8 * offsets[t.range_of(part, range)] / t.form.bits : t.cut.begin(range));
  }
};

// ---- lists ------------------------------------------------------------------------------------------------

// A part on its way to the device's memory.
struct Sent {
  Part part;
  int64_t ranges, first_range;
  Form form;
};

// Puts parts there, and finds where the ranges of each begin, counted from the first one: bytes(section, form, range)
// are those of a range. A block takes a part.
template <class Bytes, class Table>
__global__ void offsets_kernel(const __grid_constant__ Table table, Bytes bytes, Part* parts, int64_t* offsets) {
  for (int64_t item = blockIdx.x; item < table.count; item += gridDim.x) {
    const Sent& sent = table.items[item];
    if (threadIdx.x == 0) parts[item] = sent.part;
    prefix_sums_of_block(
        sent.ranges, [&](int64_t range) { return bytes(sent.part.section, sent.form, range); },
        offsets + sent.first_range);
  }
}

// Calls read(tensor, part, range) for the ranges of all parts, by whoever takes one: threads or warps.
template <class Table, class Read>
__device__ void each_range(const Table& table, int64_t first, int64_t stride, const Read& read) {
  for (int64_t unit = first; unit < table.units(); unit += stride) {
    const int item = table.item_of(unit);
    const auto& tensor = table.items[item];
    const int64_t number = unit - table.begins[item];
    read(tensor, number / tensor.cut.number, number % tensor.cut.number);
  }
}

// ---- results ----------------------------------------------------------------------------------------------

// What becomes of the sums, and of what a rank keeps.
template <class T> struct Settle {
  using W = Work<T>;
  W scale = 1, factor = 0;
  W decay = 1;  // of what is kept, without momentum
  bool masking = false;
  bool by_senders = false;  // whether a sum is divided by how many sections have the element
};

// What is kept as if nothing had been sent.
template <class T> __device__ void keep(const Summed<T>& t, const Settle<T>& s, int64_t i, T given, Work<T> kept) {
  using W = Work<T>;
  const W grad = to_work(given);
  W x = grad + kept;
  if (t.momentum) {
    const W momentum = bounded(with_momentum(s.factor, t.momentum[i], grad));
    t.momentum[i] = momentum;
    x = bounded(W(x + s.factor * momentum));
  } else {
    x = x * s.decay;
  }
  t.residual[i] = x;
}

// Takes what was sent out of what is kept. With momentum the values are exact: nothing of x is left.
template <class T> __device__ void take_out(const Summed<T>& t, const Settle<T>& s, int64_t i, Work<T> value) {
  if (!t.momentum) {
    t.residual[i] -= s.decay * value;
  } else {
    if (s.masking) t.momentum[i] = 0;
    t.residual[i] = s.factor * t.momentum[i];
  }
}

// A part of a range, as long as its sums fit into the memory of a block.
constexpr int kChunk = 4096;
struct Chunk {
  int64_t range, first;  // `first` counts from the range's beginning
  int size;
};
__host__ __device__ inline int64_t chunks_in_range(const Cut& cut) { return ceil_div(cut.elements, kChunk); }
// The last range may be much shorter than the others.
__host__ __device__ inline int64_t chunks_of(const Cut& cut) {
  const int64_t whole = cut.count / cut.elements, rest = cut.count - whole * cut.elements;
  return whole * chunks_in_range(cut) + ceil_div(rest, kChunk);
}
__device__ inline Chunk chunk_of(const Cut& cut, int64_t index) {
  const int64_t range = index / chunks_in_range(cut), first = index % chunks_in_range(cut) * kChunk;
  const int64_t end = min(first + kChunk, cut.end(range) - cut.begin(range));
  return {range, first, int(end - first)};
}

// What a list says of a chunk; its entries ascend. A warp takes them.
template <class T> class EntriesOfChunk {
 public:
  using W = Work<T>;

  __device__ EntriesOfChunk(const Summed<T>& tensor, const Lists<W>& lists, int64_t part, const Chunk& chunk)
      : chunk_(chunk) {
    find_list(tensor, lists, part);
    first_ = int(first_not_below(size_, [&](int64_t i) { return list_[i].at < chunk.first; }));
    begin();
  }
  // Where it is known which entry is the first one.
  __device__ EntriesOfChunk(const Summed<T>& tensor, const Lists<W>& lists, int64_t part, const Chunk& chunk, int first)
      : chunk_(chunk), first_(first) {
    find_list(tensor, lists, part);
    begin();
  }
  __device__ int first() const { return first_; }

  // Calls use(element of the chunk, value).
  template <class Use> __device__ void each(const Use& use) {
    while (at_ < size_ && next_.at < chunk_.first + chunk_.size) {
      use(int(next_.at - chunk_.first), next_.value);
      at_ += kWarp;
      if (at_ < size_) next_ = list_[at_];
    }
  }

 private:
  __device__ void find_list(const Summed<T>& tensor, const Lists<W>& lists, int64_t part) {
    const List list = lists.lists[tensor.range_of(part, chunk_.range)];
    list_ = lists.entries + list.first;
    size_ = int(list.size);
  }
  __device__ void begin() {
    at_ = first_ + lane_index();
    if (at_ < size_) next_ = list_[at_];
  }

  const Chunk& chunk_;
  const Entry<W>* list_;
  int size_, first_, at_;
  Entry<W> next_{};
};

// Each warp finds the entries of a part while the others do; then they take turns. Notes the first entry of the own
// one.
template <bool kCounts, class T> __device__ void add_lists(const Summed<T>& t, const Lists<Work<T>>& lists,
                                                           const Chunk& chunk, Work<T>* sums, uint16_t* senders,
                                                           int* first_of_own) {
  const int warp = int(threadIdx.x) / kWarp;
  constexpr int kWarps = kThreads / kWarp;
  for (int64_t first = 0; first < t.parts; first += kWarps) {
    EntriesOfChunk<T> entries(t, lists, min(first + warp, t.parts - 1), chunk);
    if (first + warp == t.own && lane_index() == 0) *first_of_own = entries.first();
    for (int turn = 0; turn < kWarps && first + turn < t.parts; ++turn) {
      if (turn == warp)
        entries.each([&](int i, Work<T> value) {
          sums[i] += value;
          if constexpr (kCounts) ++senders[i];
        });
      __syncthreads();
    }
  }
}

// Writes what is known of the elements of a chunk.
template <bool kCounts, class T> __device__ void write_chunk(const Summed<T>& t, const Settle<T>& s, int64_t begin,
                                                             int size, const Work<T>* sums, const uint16_t* senders) {
  using W = Work<T>;
  struct Given {
    T grad;
    W kept;
  };
  constexpr int kOfWarp = kChunk / (kThreads / kWarp);
  const int64_t first = begin + kOfWarp * (threadIdx.x / kWarp);
  const auto load = [&](int64_t i) { return t.residual ? Given{t.grad[i], t.residual[i]} : Given{}; };
  each_loaded(first, min(first + kOfWarp, begin + size), load, [&](int64_t i, const Given& given) {
    if (t.residual) keep(t, s, i, given.grad, given.kept);
    W sum = sums[i - begin];
    if (!t.ends) t.sums[i] = sum;
    if constexpr (kCounts) {
      if (!t.ends) t.senders[i] = senders[i - begin];
      sum = sum / W(max(int(senders[i - begin]), 1));
    }
    if (t.ends) t.grad[i] = from_work<T>(W(sum * s.scale));
  });
}

template <class T, bool kCounts, class Table>
__global__ void settle_kernel(const __grid_constant__ Table table, Lists<Work<T>> lists, Settle<T> s) {
  __shared__ Work<T> sums[kChunk];
  __shared__ uint16_t senders[kCounts ? kChunk : 1];
  __shared__ int first_of_own;
  for (int64_t unit = blockIdx.x; unit < table.units(); unit += gridDim.x) {
    const int item = table.item_of(unit);
    const Summed<T>& t = table.items[item];
    const Chunk chunk = chunk_of(t.cut, unit - table.begins[item]);
    const int64_t begin = t.cut.begin(chunk.range) + chunk.first;
    for (int i = int(threadIdx.x); i < chunk.size; i += kThreads) {
      sums[i] = t.begins ? Work<T>(0) : t.sums[begin + i];
      if constexpr (kCounts) senders[i] = t.begins ? 0 : t.senders[begin + i];
    }
    __syncthreads();
    add_lists<kCounts>(t, lists, chunk, sums, senders, &first_of_own);
    write_chunk<kCounts>(t, s, begin, chunk.size, sums, senders);
    __syncthreads();
    if (t.residual && t.own >= 0 && threadIdx.x < kWarp)
      EntriesOfChunk<T>(t, lists, t.own, chunk, first_of_own).each([&](int i, Work<T> value) {
        take_out(t, s, begin + i, value);
      });
    __syncthreads();
  }
}

}  // namespace
}  // namespace hvc
