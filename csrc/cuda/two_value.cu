// Signs with two values per row: the fused offer, and the fused decode of all ranks.
#include "rules/kept.h"
#include "rules/sign.h"
#include "in_rows.h"
#include "parts.h"
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
  KeptArray<Work<T>> residual;
  uint32_t* halves;  // the bits, 32 at a time: what a warp votes on
  Adding<Sides, Points> adding;
};

template <class T> struct Decoded {
  int64_t count, row_length, first_word, first_row;
  T* grad;
  void* residual;
};

// What the ranks sent, of the whole bucket.
struct Sent {
  PartList<uint32_t> halves;
  PartList<float> highs, lows;
  bool has_lows;
  int64_t ranks, own;
  Dtype kept_dtype;
  KeptDraws draws;
};

// Not of an item: its registers would be too many.
template <class T> __device__ KeptArray<Work<T>> residual_of(const Decoded<T>& d, const Sent& sent) {
  return kept_array<Work<T>>(d.residual, sent.kept_dtype, d.first_word * kWordBits, sent.draws);
}

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
  each_stretch(table, nonfinite, [](const Offered<T>& o, int64_t begin, int count, int& bad) {
    return take_block(o, begin, count, bad);
  });
}

// What ranks sent is read four at a time: a lane has the bits of one group of a go from one of them, and that rank's
// values of a row.
constexpr int kRanks = kWarp / kOfLane;
template <class W> struct OfRank {
  const uint32_t* halves;
  W high, low;
};

template <class W> __device__ OfRank<W> of_rank(const Sent& sent, int64_t rank, int64_t row) {
  const W high = sent.highs[rank][row];
  return {sent.halves[rank], high, sent.has_lows ? W(sent.lows[rank][row]) : -high};
}
template <class W> __device__ OfRank<W> of_lane(const Sent& sent, int64_t first, int64_t row) {
  return of_rank<W>(sent, min(first + lane_index() / kOfLane, sent.ranks - 1), row);
}

// A lane's elements: what they were, and what the ranks sent of them. Sums begin with what changes no number.
template <class W, int kElements> struct Taken {
  W x[kElements], total[kElements];
};

template <bool kWhole, class T, int kElements>
__device__ Taken<Work<T>, kElements> load_taken(const Decoded<T>& d, const Sent& sent, int64_t begin, int left) {
  T given[kElements];
  Taken<Work<T>, kElements> taken;
  load_offered<kWhole>(d.grad, residual_of(d, sent), begin, left, given, taken.x);
#pragma unroll
  for (int k = 0; k < kElements; ++k) taken.x[k] = to_work(given[k]) + taken.x[k], taken.total[k] = Work<T>(-0.0);
  return taken;
}

template <class W, int kElements> __device__ void take_value(Taken<W, kElements>& taken, int k, bool own, W value) {
  taken.total[k] += value;
  if (own) taken.x[k] -= value;
}

template <bool kWhole, class T, int kElements> __device__ void put_taken(const Decoded<T>& d, const Sent& sent,
                                                                         int64_t begin, int left, Work<T> scale,
                                                                         const Taken<Work<T>, kElements>& taken) {
  const auto each = [&](auto put) {
#pragma unroll
    for (int k = 0; k < kElements; ++k)
      if (kWhole || k * kWarp < left) put(k);
  };
  each([&](int k) { (d.grad + begin)[k * kWarp] = from_work<T>(taken.total[k] * scale); });
  const auto residual = residual_of(d, sent);
  each([&](int k) { residual.put(begin + k * kWarp, taken.x[k]); });
}

// Adds what the ranks sent of elements of one row. The next four are under way while these are added.
template <class W> __device__ void add_ranks(const Sent& sent, OfRank<W> mine, uint32_t halves, int64_t half,
                                             int64_t row, Taken<W, kOfLane>& taken) {
  const uint32_t bit = 1u << lane_index();
  int64_t first = 0;
  do {  // at least once, or the compiler would wait for other loads before it asks for the bits
    const OfRank<W> these = mine;
    const uint32_t bits = halves;
    if (first + kRanks < sent.ranks) {
      mine = of_lane<W>(sent, first + kRanks, row);
      halves = mine.halves[half];
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (first + r >= sent.ranks) break;
      const W high = __shfl_sync(kAllLanes, these.high, r * kOfLane);
      const W low = __shfl_sync(kAllLanes, these.low, r * kOfLane);
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) {
        const uint32_t group = __shfl_sync(kAllLanes, bits, r * kOfLane + k);
        take_value(taken, k, first + r == sent.own, group & bit ? high : low);
      }
    }
    first += kRanks;
  } while (first < sent.ranks);
}

// What the elements of a go share: their row in the bucket, and what a lane has of the first ranks.
template <class W> struct OfRow {
  int64_t row;
  OfRank<W> mine;
};

// A go within a row.
template <class T> __device__ void decode_row(const Decoded<T>& d, const Sent& sent, Work<T> scale, int64_t first,
                                              const OfRow<Work<T>>& row) {
  const int64_t half = 2 * d.first_word + first / kWarp + lane_index() % kOfLane, begin = first + lane_index();
  const uint32_t halves = row.mine.halves[half];
  auto taken = load_taken<true, T, kOfLane>(d, sent, begin, kOfWarp);
  add_ranks(sent, row.mine, halves, half, row.row, taken);
  put_taken<true>(d, sent, begin, kOfWarp, scale, taken);
}

// Elements of several rows, fewer at a time: each needs its own row's values.
template <class T, class RowAt>
__device__ void decode_rows(const Decoded<T>& d, const Sent& sent, Work<T> scale, int64_t begin, const RowAt& row_at) {
  const int left = int(min(d.count - begin, int64_t(kInFlight * kWarp)));
  int64_t rows[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) rows[k] = row_at(min(begin + k * kWarp, d.count - 1)).row;
  auto taken = load_taken<false, T, kInFlight>(d, sent, begin, left);
  const int64_t half = 2 * d.first_word + begin / kWarp;
#pragma unroll 1
  for (int64_t rank = 0; rank < sent.ranks; ++rank) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const auto sent_by = of_rank<Work<T>>(sent, rank, rows[k]);
      const uint32_t group = k * kWarp < left ? (sent_by.halves + half)[k] : 0;
      take_value(taken, k, rank == sent.own, group >> lane_index() & 1 ? sent_by.high : sent_by.low);
    }
  }
  put_taken<false>(d, sent, begin, left, scale, taken);
}

// Registers for three blocks on a multiprocessor, of float64 for two.
template <class T, class Table> __global__ void __launch_bounds__(kThreads, sizeof(Work<T>) == 8 ? 2 : 3)
    two_value_decode_kernel(const __grid_constant__ Table table, const __grid_constant__ Sent sent, Work<T> scale) {
  using W = Work<T>;
  const auto of_row = [&](const Decoded<T>& d, int64_t row) {
    return OfRow<W>{d.first_row + row, of_lane<W>(sent, 0, d.first_row + row)};
  };
  each_go_of(table, OwnRows(), of_row, [&](const Decoded<T>& d, const auto& go) {
    if constexpr (std::decay_t<decltype(go)>::whole) {
      decode_row(d, sent, scale, go.first, go.row_at(go.first));
    } else {
#pragma unroll 1
      for (int k = 0; k < kOfWarp && go.first + k < d.count; k += kInFlight * kWarp)
        decode_rows(d, sent, scale, go.first + k + lane_index(), go.row_at);
    }
  });
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void two_value_offer(const TwoValueOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype,
                     int64_t* nonfinite, Launch launch) {
  const auto shape = [&](int64_t i) { return std::pair(tensors[i].count, tensors[i].row_length); };
  const auto units = [&](int64_t i) { return groups_in(tensors[i].count, tensors[i].row_length); };
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
      return Offered<T>{static_cast<const T*>(t.grad), kept_array<Work<T>>(t.residual, kept_dtype),
                        reinterpret_cast<uint32_t*>(t.bits), adding(i)};
    };
    in_tables<Offered<T>>(tensor_count, item, units, [&](const auto& table, int64_t first) {
      start_groups(two_value_offer_kernel<T, std::decay_t<decltype(table)>>, table.units(), launch, table,
                   nonfinite + first);
    });
  });
  trees.add(tensor_count, adding, launch);
}

void two_value_decode(const TwoValueDecoded* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype,
                      const uint64_t* const* bits, const float* const* highs, const float* const* lows, int64_t ranks,
                      int64_t own, double scale, const Stream* rounding, Launch launch) {
  const KeptDraws draws = draws_for(rounding ? *rounding : Stream{});
  const Parts<uint32_t> halves_at(reinterpret_cast<const uint32_t* const*>(bits), ranks, launch);
  const Parts<float> highs_at(highs, ranks, launch), lows_at(lows, lows ? ranks : 0, launch);
  const Sent sent{halves_at.list(), highs_at.list(), lows_at.list(), lows != nullptr, ranks, own, kept_dtype, draws};
  const auto units = units_of_goes(tensors, tensor_count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto item = [&](int64_t i) {
      const TwoValueDecoded& t = tensors[i];
      return Decoded<T>{t.count, t.row_length, t.first_word, t.first_row, static_cast<T*>(t.grad), t.residual};
    };
    in_tables<Decoded<T>, sizeof(Sent) + kBeside>(tensor_count, item, units, [&](const auto& table, int64_t) {
      start(two_value_decode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, sent,
            Work<T>(scale));
    });
  });
}

}  // namespace hvc
