// Signs with two values per row: the fused offer, and the fused decode of all ranks.
#include "rules/kept.h"
#include "rules/sign.h"
#include "parts.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct Offered {
  const T* grad;
  const Work<T>* residual;
  int64_t count, row_length;
  uint32_t* halves;  // the bits, 32 at a time: what a warp votes on
  int64_t* ones;
};

template <class T> struct Decoded {
  int64_t count, row_length, first_word, first_row;
  T* grad;
  Work<T>* residual;
};

// What the ranks sent, of the whole bucket.
struct Sent {
  PartList<uint64_t> bits;
  PartList<float> highs, lows;
  bool has_lows;
  int64_t ranks, own;
};

// How many elements a warp decodes in one go: more where it looks for their tensor first.
__host__ __device__ constexpr int64_t elements_in_one_go(bool several) { return (several ? 8 : 1) * kWarp; }

// ---- kernels ----------------------------------------------------------------------------------------------

// A warp sums both sides of a block of 1024 elements, lane by lane, as the tree says.
template <class T, class Table> __global__ void two_value_offer_kernel(const __grid_constant__ Table table,
                                                                       double* block_highs, double* block_lows,
                                                                       int64_t* nonfinite) {
  using W = Work<T>;
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Offered<T>& o = table.items[item];
    const auto [row, begin, end] = block_of_row(unit - table.begins[item], o.count, o.row_length);
    const bool whole_halves = has_whole_halves(o.count, o.row_length);
    W high = 0, low = 0;
    int64_t ones = 0, bad = 0;
    for (int64_t groups = begin; groups < end; groups += kInFlight * kWarp) {
      const Loaded<T> loaded = load_groups(o.grad, o.residual, groups, end);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t group = groups + k * kWarp;
        if (group >= end) break;
        const W x = loaded.x[k];
        const bool bit = group + lane_index() < end && sign_bit(x);
        const uint32_t bits = __ballot_sync(kAllLanes, bit);
        if (lane_index() == 0) put_bits(o.halves, group, bits, whole_halves);
        high += bit ? magnitude(x) : W(0);
        low += bit ? W(0) : magnitude(x);
        ones += __popc(bits);
        bad += !can_be_kept(x);
      }
    }
    high = combine_warp(high);
    low = combine_warp(low);
    add_count(nonfinite + item, bad);
    if (lane_index() != 0) continue;
    block_highs[unit] = double(high);
    block_lows[unit] = double(low);
    add_count(o.ones + row, ones);
  }
}

template <class T>
__device__ Work<T> sent_by(const Sent& sent, int64_t rank, const Decoded<T>& d, int64_t row, int64_t i) {
  using W = Work<T>;
  const W high = sent.highs[rank][d.first_row + row];
  const bool bit = sent.bits[rank][d.first_word + i / kWordBits] >> (i % kWordBits) & 1;
  return bit ? high : sent.has_lows ? W(sent.lows[rank][d.first_row + row]) : -high;
}

template <class T, class Table> __global__ void two_value_decode_kernel(const __grid_constant__ Table table,
                                                                        const __grid_constant__ Sent sent,
                                                                        double scale) {
  using W = Work<T>;
  constexpr int64_t kMost = elements_in_one_go(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Decoded<T>& d = table.items[item];
    const int64_t first = (unit - table.begins[item]) * kMost, last = min(first + kMost, d.count);
    for (int64_t i = first + lane_index(); i < last; i += kWarp) {
      const int64_t row = row_of(i, d.row_length, d.count);
      d.residual[i] = offered(d.grad, d.residual, i) - sent_by(sent, sent.own, d, row, i);
      W total = sent_by(sent, 0, d, row, i);
      for (int64_t rank = 1; rank < sent.ranks; ++rank) total += sent_by(sent, rank, d, row, i);
      d.grad[i] = from_work<T>(total * W(scale));
    }
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void two_value_offer(const TwoValueOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t* nonfinite,
                     Launch launch) {
  const auto words = [&](int64_t i) { return words_for(tensors[i].count) * int64_t(sizeof(uint64_t)); };
  const auto rows = [&](int64_t i) { return ceil_div(tensors[i].count, tensors[i].row_length); };
  clear_counts(nonfinite, tensor_count, launch);
  clear_all(tensor_count, [&](int64_t i) { return tensors[i].bits; }, words, launch);
  clear_all(
      tensor_count, [&](int64_t i) { return tensors[i].ones; },
      [&](int64_t i) { return rows(i) * int64_t(sizeof(int64_t)); }, launch);
  const auto blocks = [&](int64_t i) { return blocks_of(tensors[i].count, tensors[i].row_length).total; };
  std::vector<int64_t> first_block(size_t(tensor_count) + 1);
  for (int64_t i = 0; i < tensor_count; ++i) first_block[size_t(i) + 1] = first_block[size_t(i)] + blocks(i);
  const Scratch<double> of_blocks(2 * first_block.back(), launch);  // of the high sides, then of the low ones
  double *highs = of_blocks.get(), *lows = highs + first_block.back();
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto item = [&](int64_t i) {
      const TwoValueOffered& t = tensors[i];
      return Offered<T>{static_cast<const T*>(t.grad),
                        static_cast<const Work<T>*>(t.residual),
                        t.count,
                        t.row_length,
                        reinterpret_cast<uint32_t*>(t.bits),
                        t.ones};
    };
    in_tables<Offered<T>>(tensor_count, item, blocks, [&](const auto& table, int64_t first) {
      const int64_t at = first_block[size_t(first)];
      start(two_value_offer_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, highs + at,
            lows + at, nonfinite + first);
    });
  });
  // Both sides of all tensors are added up together.
  const auto tensor = [&](int64_t i) -> const TwoValueOffered& { return tensors[i % tensor_count]; };
  add_blocks<false, Plain<double>>(
      2 * tensor_count, [&](int64_t i) { return units_of(tensor(i).count, tensor(i).row_length); }, of_blocks.get(),
      [&](int64_t i) { return i / tensor_count * first_block.back() + first_block[size_t(i % tensor_count)]; },
      [&](int64_t i) { return Plain<double>{i < tensor_count ? tensor(i).highs : tensor(i).lows}; }, launch);
}

void two_value_decode(const TwoValueDecoded* tensors, int64_t tensor_count, Dtype dtype, const uint64_t* const* bits,
                      const float* const* highs, const float* const* lows, int64_t ranks, int64_t own, double scale,
                      Launch launch) {
  const Parts<uint64_t> bits_at(bits, ranks, launch);
  const Parts<float> highs_at(highs, ranks, launch), lows_at(lows, lows ? ranks : 0, launch);
  const Sent sent{bits_at.list(), highs_at.list(), lows_at.list(), lows != nullptr, ranks, own};
  const auto units = [&](int64_t i) { return ceil_div(tensors[i].count, elements_in_one_go(tensor_count > 1)); };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto item = [&](int64_t i) {
      const TwoValueDecoded& t = tensors[i];
      return Decoded<T>{
          t.count, t.row_length, t.first_word, t.first_row, static_cast<T*>(t.grad), static_cast<Work<T>*>(t.residual)};
    };
    in_tables<Decoded<T>, sizeof(Sent) + kBeside>(tensor_count, item, units, [&](const auto& table, int64_t) {
      start(two_value_decode_kernel<T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table, sent,
            scale);
    });
  });
}

}  // namespace hvc
