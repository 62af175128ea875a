// The k-th largest magnitude of each side, digit by digit; and what may be among the k largest, found in one pass.
#pragma once
#include <cub/device/device_select.cuh>

#include <iterator>

#include "rules/select.h"
#include "grid.h"
#include "rows.h"
#include "select_operands.h"

namespace hvc {
namespace {

// A zero stands for NaN: neither is ever kept.
template <class W> __device__ W less_nan(W x) { return x > 0 || x < 0 ? x : W(0); }

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
template <class K> constexpr int kKeyBits = int(8 * sizeof(K));
template <class K> constexpr int kDigits = (kKeyBits<K> + kDigitBits - 1) / kDigitBits;

// What is known of the k-th largest key of a side: its digits so far, and which of the keys with these digits it is.
// `whole` says that all keys are kept.
template <class K> struct Search {
  K key;
  int64_t rank;
  bool whole;
};

// ---- where keys come from -----------------------------------------------------------------------------------

template <class T> struct Whole {
  using W = Work<T>;
  Input<T> in;
  __device__ int64_t size() const { return in.count; }
  __device__ W value(int64_t i) const { return offered(in.grad, in.residual, i); }
  __device__ int32_t position(int64_t i) const { return int32_t(i); }
};

// Every `step`-th element.
template <class T> struct Sampled {
  using W = Work<T>;
  Input<T> in;
  int64_t step;
  __device__ int64_t size() const { return in.count / step; }
  __device__ W value(int64_t i) const { return offered(in.grad, in.residual, i * step); }
};

template <class V> struct Candidate {
  V value;
  int32_t position;
};

// The elements that may be kept, in index order. More may have been found than there is room for.
template <class V> struct Few {
  using W = V;
  Candidate<V>* list;
  const int64_t* found;
  int64_t room;
  __device__ int64_t size() const { return min(*found, room); }
  __device__ W value(int64_t i) const { return list[i].value; }
  __device__ int32_t position(int64_t i) const { return list[i].position; }
};

// ---- digits -------------------------------------------------------------------------------------------------

// One digit of all keys of a search, and where it counts.
template <class K> struct Digit {
  int shift, above;  // the lowest bit of it, and of the digits before it
  int64_t k;
  int64_t* counts;
  unsigned* arrived;
  Search<K>* searches;
};

// What to note at the first digit, where it is asked for.
template <class K> struct Noted {
  int64_t* nonfinite = nullptr;
  const Search<K>* floors = nullptr;  // of the candidates
  const int64_t* found = nullptr;     // how many these are
  int64_t room = 0;
  int64_t* wanting = nullptr;  // becomes 1 if the k largest are not among them
};

// Of a side whose candidates begin at a key there have to be k; 0 lets all pass.
template <class K> __device__ void note_want(const Noted<K>& noted, const Digit<K>& digit, int side, int64_t total) {
  if (!noted.wanting) return;
  const bool enough = noted.floors[side].key == 0 || total >= digit.k;
  if (!enough || *noted.found > noted.room) *noted.wanting = 1;
}

// The last block of a grid chooses the digit of each side.
template <int kSides, class K> __device__ void choose(const Digit<K>& digit, const Noted<K>& noted) {
  for (int side = 0; side < kSides; ++side) {
    Search<K> s = digit.above == kKeyBits<K> ? Search<K>{0, digit.k, false} : digit.searches[side];
    const Ranked ranked = bin_of_rank(digit.counts + side * kBins, kBins, s.rank);
    if (threadIdx.x != 0 || s.whole) continue;
    const bool first = digit.above == kKeyBits<K>;
    if (first) note_want(noted, digit, side, ranked.total);
    if (first && ranked.total <= s.rank)
      digit.searches[side] = {0, 0, true};
    else
      digit.searches[side] = {K(s.key | K(ranked.bin) << digit.shift), ranked.rank, false};
  }
}

// Counts a digit of the keys that agree with the search so far.
template <int kSides, class Source, class K>
__global__ void digits_kernel(Source source, Digit<K> digit, Noted<K> noted) {
  __shared__ unsigned counts[kSides * kBins];
  for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) counts[i] = 0;
  __syncthreads();
  const bool first = digit.above == kKeyBits<K>;
  const K above = first ? K(0) : K(~K(0) << digit.above);
  K known[kSides];
  for (int side = 0; side < kSides; ++side) known[side] = first ? K(0) : digit.searches[side].key & above;
  int64_t bad = 0;
  for (int64_t i = first_item(); i < source.size(); i += item_stride()) {
    const auto given = source.value(i), x = less_nan(given);
    bad += !is_finite(given);
    const K key = key_of(x);
    const int side = side_of<kSides>(x);
    const K wanted = kSides == 1 || side == 0 ? known[0] : known[kSides - 1];
    if (key != 0 && (key & above) == wanted)
      atomicAdd(&counts[side * kBins + int(key >> digit.shift & (kBins - 1))], 1u);
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kSides * kBins; i += kThreads) add_count(digit.counts + i, counts[i]);
  if (noted.nonfinite) add_count(noted.nonfinite, bad);
  if (is_last_block(digit.arrived)) choose<kSides>(digit, noted);
}

// Memory for the counts of so many digits, cleared at once.
template <int kSides> class Counters {
 public:
  Counters(int digits, Launch launch) : memory_(digits * kEach, launch) {
    clear(memory_.get(), digits * kEach * int64_t(sizeof(int64_t)), launch);
  }
  int64_t* of(int digit) const { return memory_.get() + digit * kEach; }
  unsigned* arrived(int digit) const { return reinterpret_cast<unsigned*>(of(digit) + kSides * kBins); }

 private:
  static constexpr int64_t kEach = kSides * kBins + 1;
  Scratch<int64_t> memory_;
};

// Blocks enough to keep a GPU busy, and few enough that adding up their bins takes no time.
inline int64_t items_for(int64_t count) { return std::min<int64_t>(count, 1 << 19); }

// Finds the first `digits` digits of the k-th largest key of each side, in at most `size` keys of a source.
template <int kSides, class Source, class K> void find_digits(const Source& source, int64_t size, int64_t k, int digits,
                                                              Search<K>* searches, const Noted<K>& noted,
                                                              Launch launch) {
  const Counters<kSides> counters(digits, launch);
  int above = kKeyBits<K>;
  for (int number = 0; number < digits; ++number) {
    const int shift = std::max(above - kDigitBits, 0);
    const Digit<K> digit{shift, above, k, counters.of(number), counters.arrived(number), searches};
    start(digits_kernel<kSides, Source, K>, items_for(size), launch, source, digit, number == 0 ? noted : Noted<K>{});
    above = shift;
  }
}

// ---- candidates ---------------------------------------------------------------------------------------------

// The elements of an input with their positions, for CUB.
template <class T> struct Offers {
  using value_type = Candidate<Work<T>>;
  using difference_type = std::ptrdiff_t;
  using pointer = void;
  using reference = value_type;
  using iterator_category = std::random_access_iterator_tag;

  const T* grad;
  const Work<T>* residual;
  int32_t at;
  __host__ __device__ Offers operator+(difference_type n) const { return {grad, residual, int32_t(at + n)}; }
  __device__ value_type operator*() const { return {offered(grad, residual, at), at}; }
  __device__ value_type operator[](difference_type n) const { return *(*this + n); }
};

// Where CUB writes candidates: what finds no room is dropped.
template <class W> struct Room {
  using value_type = void;
  using difference_type = std::ptrdiff_t;
  using pointer = void;
  using reference = void;
  using iterator_category = std::random_access_iterator_tag;

  struct Slot {
    Candidate<W>* into;
    __device__ void operator=(const Candidate<W>& candidate) const {
      if (into) *into = candidate;
    }
  };
  Candidate<W>* list;
  int32_t room, at;
  __host__ __device__ Room operator+(difference_type n) const { return {list, room, int32_t(at + n)}; }
  __device__ Slot operator*() const { return {at < room ? list + at : nullptr}; }
  __device__ Slot operator[](difference_type n) const { return *(*this + n); }
};

// NaN pass, to be counted.
template <int kSides, class W> struct MayBeKept {
  const Search<Key<W>>* floors;
  __device__ bool operator()(const Candidate<W>& candidate) const {
    const W x = candidate.value;
    const Key<W> key = key_of(x);
    return (key != 0 && key >= floors[side_of<kSides>(x)].key) || !(x == x);
  }
};

template <int kSides, class T> void find_candidates(const Input<T>& in, const Search<Key<Work<T>>>* floors,
                                                    const Few<Work<T>>& few, int64_t* found, Launch launch) {
  using W = Work<T>;
  const Offers<T> from{in.grad, in.residual, 0};
  const Room<W> into{few.list, int32_t(few.room), 0};
  const MayBeKept<kSides, W> choose{floors};
  size_t bytes = 0;
  check(cub::DeviceSelect::If(nullptr, bytes, from, into, found, int(in.count), choose, stream_of(launch)), "Select");
  const Scratch<char> memory(int64_t(bytes), launch);
  check(cub::DeviceSelect::If(memory.get(), bytes, from, into, found, int(in.count), choose, stream_of(launch)),
        "Select");
}

}  // namespace
}  // namespace hvc
