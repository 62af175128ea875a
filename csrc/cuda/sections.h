// Sections of several ranks: each range of each becomes a list, all at the same time; then blocks add the lists in the
// ranks' order, piece by piece of the tensor, and write the result.
#pragma once
#include <memory>
#include <vector>

#include "rules/dense.h"
#include "rules/golomb.h"
#include "grid.h"
#include "rows.h"
#include "scan.h"

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
constexpr int64_t kPartsTogether = 64;
inline int64_t room_by_bytes(const Section& section, int64_t bits) { return 8 * section.bytes / bits; }
inline int64_t room_of(const Section& section, const Cut& cut, int64_t bits) {
  return std::min(room_by_bytes(section, bits), cut.count);
}

// Some of the sections. Range r of part p has index p * cut.number + r.
template <class W> struct Batch {
  Part parts[kPartsTogether];
  int64_t size;
  Cut cut;
  int64_t bits;  // of an entry, at least
  int64_t* offsets;
  Entry<W>* entries;
  List* lists;

  __device__ int64_t first_entry(int64_t part, int64_t range) const {
    const Part& p = parts[part];
    return p.lists + (p.by_bytes ? 8 * offsets[part * cut.number + range] / bits : cut.begin(range));
  }
};

// ---- lists ------------------------------------------------------------------------------------------------

// Finds where the ranges of a section begin, counted from the first one. A block takes a section.
template <class W, class Bytes> __global__ void offsets_kernel(const __grid_constant__ Batch<W> batch, Bytes bytes) {
  for (int64_t part = blockIdx.x; part < batch.size; part += gridDim.x) {
    const Section& section = batch.parts[part].section;
    prefix_sums_of_block(
        batch.cut.number, [&](int64_t range) { return bytes(section, range); },
        batch.offsets + part * batch.cut.number);
  }
}

// ---- results ----------------------------------------------------------------------------------------------

// What becomes of the sums, and of what a rank keeps. Sums are only in memory where the sections of a tensor are taken
// in several batches.
template <class T> struct Settle {
  using W = Work<T>;
  W* sums;
  bool begins, ends;  // whether this is the first batch, and the last one
  W scale;
  T* grad;
  W* residual;  // only in one of the batches: that of the own section
  W* momentum;
  W factor;
  bool masking;
  int64_t own;                  // which part of the batch, or -1
  W decay = 1;                  // of what is kept, without momentum
  bool by_senders = false;      // whether a sum is divided by how many sections have the element
  uint16_t* senders = nullptr;  // their numbers, where the sums are in memory
};

// What is kept as if nothing had been sent.
template <class T> __device__ void keep(const Settle<T>& s, int64_t i, T given, Work<T> kept) {
  using W = Work<T>;
  const W grad = to_work(given);
  W x = grad + kept;
  if (s.momentum) {
    const W momentum = bounded(with_momentum(s.factor, s.momentum[i], grad));
    s.momentum[i] = momentum;
    x = bounded(W(x + s.factor * momentum));
  } else {
    x = x * s.decay;
  }
  s.residual[i] = x;
}

// Takes what was sent out of what is kept. With momentum the values are exact: nothing of x is left.
template <class T> __device__ void take_out(const Settle<T>& s, int64_t i, Work<T> value) {
  if (!s.momentum) {
    s.residual[i] -= s.decay * value;
  } else {
    if (s.masking) s.momentum[i] = 0;
    s.residual[i] = s.factor * s.momentum[i];
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
template <class W> class EntriesOfChunk {
 public:
  __device__ EntriesOfChunk(const Batch<W>& batch, int64_t part, const Chunk& chunk) : chunk_(chunk) {
    find_list(batch, part);
    first_ = int(first_not_below(size_, [&](int64_t i) { return list_[i].at < chunk.first; }));
    begin();
  }
  // Where it is known which entry is the first one.
  __device__ EntriesOfChunk(const Batch<W>& batch, int64_t part, const Chunk& chunk, int first)
      : chunk_(chunk), first_(first) {
    find_list(batch, part);
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
  __device__ void find_list(const Batch<W>& batch, int64_t part) {
    const List list = batch.lists[part * batch.cut.number + chunk_.range];
    list_ = batch.entries + list.first;
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

// Each warp finds the entries of a part while the others do; then they take turns. Notes the first entry of one part.
template <bool kCounts, class W> __device__ void add_lists(const Batch<W>& batch, const Chunk& chunk, W* sums,
                                                           uint16_t* senders, int64_t noted, int* first_of_noted) {
  constexpr int kWarps = kThreads / kWarp;
  const int warp = int(threadIdx.x) / kWarp;
  for (int64_t first = 0; first < batch.size; first += kWarps) {
    EntriesOfChunk<W> entries(batch, min(first + warp, batch.size - 1), chunk);
    if (first + warp == noted && lane_index() == 0) *first_of_noted = entries.first();
    for (int turn = 0; turn < kWarps && first + turn < batch.size; ++turn) {
      if (turn == warp)
        entries.each([&](int i, W value) {
          sums[i] += value;
          if constexpr (kCounts) ++senders[i];
        });
      __syncthreads();
    }
  }
}

// Writes what is known of the elements of a chunk.
template <bool kCounts, class T>
__device__ void write_chunk(const Settle<T>& s, int64_t begin, int size, const Work<T>* sums, const uint16_t* senders) {
  using W = Work<T>;
  struct Given {
    T grad;
    W kept;
  };
  constexpr int kOfWarp = kChunk / (kThreads / kWarp);
  const int64_t first = begin + kOfWarp * (threadIdx.x / kWarp);
  const auto load = [&](int64_t i) { return s.residual ? Given{s.grad[i], s.residual[i]} : Given{}; };
  each_loaded(first, min(first + kOfWarp, begin + size), load, [&](int64_t i, const Given& given) {
    if (s.residual) keep(s, i, given.grad, given.kept);
    W sum = sums[i - begin];
    if (!s.ends) s.sums[i] = sum;
    if constexpr (kCounts) {
      if (!s.ends) s.senders[i] = senders[i - begin];
      sum = sum / W(max(int(senders[i - begin]), 1));
    }
    if (s.ends) s.grad[i] = from_work<T>(W(sum * s.scale));
  });
}

template <class T, bool kCounts>
__global__ void settle_kernel(const __grid_constant__ Batch<Work<T>> batch, Settle<T> s) {
  __shared__ Work<T> sums[kChunk];
  __shared__ uint16_t senders[kCounts ? kChunk : 1];
  __shared__ int first_of_own;
  const int64_t chunks = chunks_of(batch.cut);
  for (int64_t index = blockIdx.x; index < chunks; index += gridDim.x) {
    const Chunk chunk = chunk_of(batch.cut, index);
    const int64_t begin = batch.cut.begin(chunk.range) + chunk.first;
    for (int i = int(threadIdx.x); i < chunk.size; i += kThreads) {
      sums[i] = s.begins ? Work<T>(0) : s.sums[begin + i];
      if constexpr (kCounts) senders[i] = s.begins ? 0 : s.senders[begin + i];
    }
    __syncthreads();
    add_lists<kCounts>(batch, chunk, sums, senders, s.own, &first_of_own);
    write_chunk<kCounts>(s, begin, chunk.size, sums, senders);
    __syncthreads();
    if (s.residual && s.own >= 0 && threadIdx.x < kWarp)
      EntriesOfChunk<Work<T>>(batch, s.own, chunk, first_of_own).each([&](int i, Work<T> value) {
        take_out(s, begin + i, value);
      });
    __syncthreads();
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

// Sections that cannot be read are known before any kernel starts: their ranges are counted here.
__global__ void count_kernel(int64_t* total, int64_t count) { add_count(total, count); }

inline void count_all_ranges(const Cut& cut, int64_t* wrong, Launch launch) {
  start_blocks(count_kernel, 1, 1, launch, wrong, std::max<int64_t>(cut.number, 1));
}

// What a method's sections look like: the bytes before the ranges, the fewest bits of an entry, and a rule for the
// kernels, by which bytes(section, range) are those of a range.
template <class Bytes> struct Form {
  int64_t head, bits;
  Bytes bytes;
};

// Calls run(batch) with a batch of sections whose ranges have been found, and memory for their lists.
template <class W, class Bytes, class Run> void with_batch(const Section* const* sections, int64_t size, const Cut& cut,
                                                           const Form<Bytes>& form, int64_t room, Launch launch,
                                                           const Run& run) {
  const int64_t ranges = size * cut.number;
  const Scratch<int64_t> offsets(ranges, launch);
  const Scratch<List> found(ranges, launch);
  const Scratch<Entry<W>> entries(room, launch);
  Batch<W> batch{{}, size, cut, form.bits, offsets.get(), entries.get(), found.get()};
  int64_t lists = 0;
  for (int64_t i = 0; i < size; ++i) {
    batch.parts[i] = {*sections[i], lists, room_by_bytes(*sections[i], form.bits) < cut.count};
    lists += room_of(*sections[i], cut, form.bits);
  }
  if (ranges > 0)
    start_blocks(offsets_kernel<W, Bytes>, std::min(size, kMostBlocks), kThreads, launch, batch, form.bytes);
  run(batch);
}

// Adds up the sections of a tensor that can be read, and writes the result. `lists` starts the kernel that reads the
// sections of a batch. Lists take no more memory than there are elements, or one section needs.
template <bool kMayCount = false, class T, class Bytes, class Lists>
void add_sections(const Section* sections, int64_t section_count, int64_t own, const Cut& cut, const Form<Bytes>& form,
                  const Settle<T>& settle, int64_t* wrong, Launch launch, const Lists& lists) {
  using W = Work<T>;
  std::vector<const Section*> readable;
  for (const Section* section = sections; section != sections + section_count; ++section) {
    if (section->bytes >= form.head)
      readable.push_back(section);
    else
      count_all_ranges(cut, wrong, launch);
  }
  const auto all = int64_t(readable.size());
  const Section* const mine = own >= 0 && sections[own].bytes >= form.head ? sections + own : nullptr;
  std::unique_ptr<Scratch<W>> sums;
  std::unique_ptr<Scratch<uint16_t>> senders;
  for (int64_t first = 0, end = 0; first == 0 || first < all; first = end) {
    int64_t room = 0;
    for (; end < all && end - first < kPartsTogether; ++end) {
      const int64_t more = room_of(*readable[size_t(end)], cut, form.bits);
      if (end > first && room + more > cut.count) break;
      room += more;
    }
    Settle<T> s = settle;
    s.begins = first == 0, s.ends = end == all;
    if (!s.ends && !sums) sums = std::make_unique<Scratch<W>>(cut.count, launch);
    s.sums = sums ? sums->get() : nullptr;
    if (sums && s.by_senders && !senders) senders = std::make_unique<Scratch<uint16_t>>(cut.count, launch);
    s.senders = senders ? senders->get() : nullptr;
    const auto at = std::find(readable.begin() + first, readable.begin() + end, mine);
    s.own = at != readable.begin() + end ? at - (readable.begin() + first) : -1;
    if (mine ? s.own < 0 : !s.ends) s.residual = nullptr;
    with_batch<W>(readable.data() + first, end - first, cut, form, room, launch, [&](const Batch<W>& batch) {
      if (batch.size > 0) lists(batch);
      const int64_t chunks = chunks_of(cut);
      auto kernel = settle_kernel<T, false>;
      if constexpr (kMayCount) kernel = s.by_senders ? settle_kernel<T, true> : kernel;
      if (chunks > 0) start_blocks(kernel, std::min(chunks, kMostBlocks), kThreads, launch, batch, s);
    });
    if (s.ends) break;
  }
}

}  // namespace
}  // namespace hvc
