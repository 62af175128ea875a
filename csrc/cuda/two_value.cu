// Signs with two values per row: the fused offer, and the fused decode of all ranks.
#include "rules/kept.h"
#include "rules/sign.h"
#include "parts.h"
#include "rows.h"
#include "trees.h"
#include "visit.h"

namespace hvc {
namespace {

// What is added up of a row; the number of ones is exact in float64.
struct Sides {
  double high, low, ones;
  __device__ void take(const Sides& other) {
    high += other.high;
    low += other.low;
    ones += other.ones;
  }
};

struct Points {
  double *highs, *lows;
  int64_t* ones;
  __device__ void operator()(int64_t row, const Sides& found) const {
    highs[row] = canonical(found.high);
    lows[row] = canonical(found.low);
    ones[row] = int64_t(found.ones);
  }
};

template <class T> struct Offered {
  const T* grad;
  const Work<T>* residual;
  uint32_t* halves;  // the bits, 32 at a time: what a warp votes on
  Adding<Sides, Points> adding;
};

template <class T> struct Decoded {
  int64_t count, row_length, first_word, first_row;
  T* grad;
  Work<T>* residual;
};

// What the ranks sent, of the whole bucket.
struct Sent {
  PartList<uint32_t> halves;
  PartList<float> highs, lows;
  bool has_lows;
  int64_t ranks, own;
};

// ---- kernels ----------------------------------------------------------------------------------------------

// What a lane finds of a block: the bits of its group, and its part of the sums.
template <class W> struct OfLane {
  W high = 0, low = 0;
  int bad = 0;
  uint32_t bits = 0;
};

template <bool kWhole, class T>
__device__ void take_groups(const Offered<T>& o, int64_t begin, int count, int first, OfLane<Work<T>>& found) {
  using W = Work<T>;
  const int64_t at = begin + first * kWarp + lane_index();
  const int left = count - first * kWarp - lane_index();
  T given[kGroups];
  W x[kGroups];
  load_offered<kWhole>(o.grad, o.residual, at, left, given, x);
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    x[k] = to_work(given[k]) + x[k];
    const bool bit = (kWhole || k * kWarp < left) && sign_bit(x[k]);
    const uint32_t bits = __ballot_sync(kAllLanes, bit);
    found.bits = lane_index() == first + k ? bits : found.bits;
    found.high += bit ? magnitude(x[k]) : W(0);
    found.low += bit ? W(0) : magnitude(x[k]);
    found.bad += !can_be_kept(x[k]);
  }
}

// Takes a block, writes its bits, and returns what both sides come to, summed lane by lane, as the tree says.
template <class T> __device__ Sides take_block(const Offered<T>& o, int64_t begin, int count, int& bad) {
  OfLane<Work<T>> found;
  for (int first = 0; first * kWarp < count; first += kGroups) {
    if (count == kBlock)
      take_groups<true>(o, begin, count, first, found);
    else
      take_groups<false>(o, begin, count, first, found);
  }
  put_block(o.halves, o.adding.tree, begin, count, found.bits);
  bad += found.bad;
  const int ones = combine_warp(__popc(found.bits));
  return {double(combine_warp(found.high)), double(combine_warp(found.low)), double(ones)};
}

template <class T, class Table>
__global__ void two_value_offer_kernel(const __grid_constant__ Table table, int64_t* nonfinite) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Offered<T>& o = table.items[item];
    const Stretch stretch = stretch_of(o.adding.tree, unit - table.begins[item]);
    Sides sides{};
    int bad = 0;
    for (int64_t begin = stretch.begin; begin < stretch.end; begin += kBlock)
      sides.take(take_block(o, begin, int(min(kBlock, stretch.end - begin)), bad));
    add_count(nonfinite + item, bad);
    note_stretch(o.adding, stretch, sides);
  }
}

// What the ranks' values add up to, of a lane's elements, and what its own rank sent.
template <class W> struct Totals {
  W total[kInFlight], own[kInFlight];
};

// What a rank sent: a lane has the bits of a group, and both values of a row.
template <class W> struct OfRank {
  uint32_t halves;
  W high, low;
};
template <class W>
__device__ OfRank<W> of_rank(const Sent& sent, int64_t rank, int64_t half, bool inside, int64_t row) {
  const W high = sent.highs[rank][row], low = sent.has_lows ? W(sent.lows[rank][row]) : -high;
  return {inside ? sent.halves[rank][half] : 0, high, low};
}

template <class W>
__device__ void add_value(const Sent& sent, int64_t rank, int k, uint32_t halves, W high, W low, Totals<W>& found) {
  const bool bit = __shfl_sync(kAllLanes, halves, k) >> lane_index() & 1;
  const W value = bit ? high : low;
  found.total[k] = rank == 0 ? value : found.total[k] + value;
  if (rank == sent.own) found.own[k] = value;
}

// Adds what the ranks sent of elements of one row: of several ranks at once it is under way.
template <class W>
__device__ void add_ranks(const Sent& sent, int64_t half, bool inside, int64_t row, Totals<W>& found) {
  constexpr int kRanks = 4;
  for (int64_t first = 0; first < sent.ranks; first += kRanks) {
    OfRank<W> sent_by[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const int64_t rank = min(first + r, sent.ranks - 1);
      sent_by[r] = of_rank<W>(sent, rank, half, inside, row);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (first + r >= sent.ranks) break;
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        add_value(sent, first + r, k, sent_by[r].halves, sent_by[r].high, sent_by[r].low, found);
    }
  }
}

template <class T>
__device__ void decode_groups(const Decoded<T>& d, const Sent& sent, Work<T> scale, int64_t begin, int64_t last) {
  using W = Work<T>;
  const Loaded<T> loaded = load_groups<T>(d.grad, d.residual, begin, last);
  const int64_t half = 2 * d.first_word + begin / kWarp + lane_index(), end = min(begin + kInFlight * kWarp, last);
  const bool inside = lane_index() < kInFlight && begin + lane_index() * kWarp < last;
  const int64_t row = row_of(begin, d.row_length, d.count);
  Totals<W> found{};
  if (row == row_of(end - 1, d.row_length, d.count)) {
    add_ranks(sent, half, inside, d.first_row + row, found);
  } else {
    for (int64_t rank = 0; rank < sent.ranks; ++rank)
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t i = min(begin + k * kWarp + lane_index(), last - 1);
        const auto mine = of_rank<W>(sent, rank, half, inside, d.first_row + row_of(i, d.row_length, d.count));
        add_value(sent, rank, k, mine.halves, mine.high, mine.low, found);
      }
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t i = begin + k * kWarp + lane_index();
    if (i >= last) break;
    d.residual[i] = loaded.x[k] - found.own[k];
    d.grad[i] = from_work<T>(found.total[k] * scale);
  }
}

template <class T, class Table> __global__ void two_value_decode_kernel(const __grid_constant__ Table table,
                                                                        const __grid_constant__ Sent sent,
                                                                        Work<T> scale) {
  constexpr int64_t kMost = in_one_go(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Decoded<T>& d = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost, last = min(first + kMost, d.count);
    for (int64_t begin = first; begin < last; begin += kInFlight * kWarp) decode_groups(d, sent, scale, begin, last);
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void two_value_offer(const TwoValueOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t* nonfinite,
                     Launch launch) {
  const auto shape = [&](int64_t i) { return std::pair(tensors[i].count, tensors[i].row_length); };
  const auto units = [&](int64_t i) { return stretches_in(tensors[i].count, tensors[i].row_length); };
  clear_counts(nonfinite, tensor_count, launch);
  clear_bits(tensors, tensor_count, launch);
  const Trees<Sides> trees(tensor_count, shape, true, launch);
  const auto adding = [&](int64_t i) {
    const TwoValueOffered& t = tensors[i];
    return Adding<Sides, Points>{trees.of(i, t.count, t.row_length), {t.highs, t.lows, t.ones}};
  };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto item = [&](int64_t i) {
      const TwoValueOffered& t = tensors[i];
      return Offered<T>{static_cast<const T*>(t.grad), static_cast<const Work<T>*>(t.residual),
                        reinterpret_cast<uint32_t*>(t.bits), adding(i)};
    };
    in_tables<Offered<T>>(tensor_count, item, units, [&](const auto& table, int64_t first) {
      start(two_value_offer_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table,
            nonfinite + first);
    });
  });
  trees.add(tensor_count, adding, launch);
}

void two_value_decode(const TwoValueDecoded* tensors, int64_t tensor_count, Dtype dtype, const uint64_t* const* bits,
                      const float* const* highs, const float* const* lows, int64_t ranks, int64_t own, double scale,
                      Launch launch) {
  const Parts<uint32_t> halves_at(reinterpret_cast<const uint32_t* const*>(bits), ranks, launch);
  const Parts<float> highs_at(highs, ranks, launch), lows_at(lows, lows ? ranks : 0, launch);
  const Sent sent{halves_at.list(), highs_at.list(), lows_at.list(), lows != nullptr, ranks, own};
  const auto units = units_in_one_go(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto item = [&](int64_t i) {
      const TwoValueDecoded& t = tensors[i];
      return Decoded<T>{
          t.count, t.row_length, t.first_word, t.first_row, static_cast<T*>(t.grad), static_cast<Work<T>*>(t.residual)};
    };
    in_tables<Decoded<T>, sizeof(Sent) + kBeside>(tensor_count, item, units, [&](const auto& table, int64_t) {
      start(two_value_decode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, sent,
            Work<T>(scale));
    });
  });
}

}  // namespace hvc
