// Signs with a scale for each block: the fused offer, the fold of all ranks' records, and the fused decode.
#include "in_rows.h"
#include "parts.h"
#include "record_operands.h"
#include "visit.h"

namespace hvc {
namespace {

template <class W> using Fold = RecordFold<W, PartList<uint8_t>>;

// ---- kernels ----------------------------------------------------------------------------------------------

// Writes the bits of the elements of a go that there are, whole groups of 32. `bit(k)` is that of a lane's k-th
// element. Records lie at any address: a lane writes a byte.
template <class AGo, class Bit> __device__ void put_record_bits(uint8_t* record, const AGo& go, const Bit& bit) {
  uint32_t mine = 0;
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    const uint32_t bits = __ballot_sync(kAllLanes, bit(k));
    if (lane_index() == k) mine = bits;
  }
  const uint32_t bits = __shfl_sync(kAllLanes, mine, lane_index() / 4);
  if (go.whole || go.first + lane_index() / 4 * kWarp < go.count)
    record[kScaleBytes + go.first / 8 + lane_index()] = uint8_t(bits >> 8 * (lane_index() % 4));
}
// A lane's bits of a go are in bytes four apart: `element` is 32 k behind the lane's first one, or past the end.
__device__ inline uint8_t byte_of_bits(const uint8_t* record, int64_t first, int64_t element) {
  const int64_t mine = first + lane_index();
  return record[kScaleBytes + (mine >> 3) + ((element - mine) >> 3)];
}
__device__ inline bool record_bit(uint8_t bits) { return bits >> (lane_index() % 8) & 1; }

// Every lane gets the scale.
__device__ inline float measured_scale(ScaleRule rule, double lane, int64_t count) {
  return record_scale(rule, __shfl_sync(kAllLanes, combine_warp(lane), 0), count);
}

__device__ inline void finish_record(uint8_t* record, int64_t block, int64_t count, float scale) {
  const uint32_t bits = bit_cast<uint32_t>(scale);
  if (lane_index() < 4) record[lane_index()] = uint8_t(bits >> 8 * lane_index());
  const int64_t written = kScaleBytes + ceil_div(count, kWarp) * 4, end = record_bytes(block);
  for (int64_t i = written + lane_index(); i < end; i += kWarp) record[i] = 0;
}

// Calls body(go) for a record's elements, numbered from its own first one on.
template <class Body> __device__ void each_go_of_record(int64_t count, const Body& body) {
  each_go(0, count, {count, count}, NoRows(), body);
}

// A warp makes one record.
template <class T> __global__ void record_offer_kernel(RecordOffer<T> o, int64_t* total) {
  using W = Work<T>;
  int64_t nonfinite = 0;
  for (int64_t index = first_warp(); index < ceil_div(o.count, o.block); index += warp_stride()) {
    const int64_t begin = index * o.block, count = min(o.block, o.count - begin);
    uint8_t* record = o.records + index * record_bytes(o.block);
    double sum = 0;
    each_go_of_record(count, [&](const auto& go) {
      bool bits[kOfLane] = {};
      each_of_go(
          go, [&](int64_t i, NoRows) { return offered(o.grad, o.residual, begin + i); },
          [&](const Place& place, W x, NoRows) {
            bits[place.k] = sign_bit(x);
            nonfinite += !can_be_kept(x);
            sum += scale_term(o.rule, double(magnitude(x)));
          });
      put_record_bits(record, go, [&](int k) { return bits[k]; });
    });
    finish_record(record, o.block, count, measured_scale(o.rule, sum, count));
  }
  add_count(total, nonfinite);
}

template <class W> __global__ void record_fold_kernel(Fold<W> o) {
  for (int64_t index = first_warp(); index < ceil_div(o.count, o.block); index += warp_stride()) {
    const int64_t begin = index * o.block, count = min(o.block, o.count - begin);
    const int64_t at = index * record_bytes(o.block);
    W* left = o.left + begin;
    double scales = 0, sum = 0;
    for (int64_t rank = 0; rank < o.ranks; ++rank) scales += double(scale_of_record(o.parts[rank] + at));
    each_go_of_record(count, [&](const auto& go) {
      W totals[kOfLane];
      for (W& total : totals) total = W(-0.0);  // which added to a number is that number
      for (int64_t rank = 0; rank < o.ranks; ++rank) {
        const uint8_t* record = o.parts[rank] + at;
        const W step = W(double(scale_of_record(record)) / double(o.ranks));
        each_of_go(
            go, [&](int64_t i, NoRows) { return byte_of_bits(record, go.first, i); },
            [&](const Place& place, uint8_t bits, NoRows) { totals[place.k] += signed_step(record_bit(bits), step); });
      }
      each_of_go(
          go, [&](int64_t i, NoRows) { return o.kept[begin + i]; },
          [&](const Place& place, W kept, NoRows) {
            W& total = totals[place.k];
            left[place.i] = total += kept;
            sum += scale_term(o.rule, double(magnitude(total)));
          });
      __syncwarp();  // all lanes have read the bits that are written now
      put_record_bits(o.out + at, go, [&](int k) {
        return (go.whole || go.first + k * kWarp + lane_index() < count) && sign_bit(totals[k]);
      });
    });
    __syncwarp();  // and the scales
    const float scale = o.rule == kShared ? record_scale(kShared, scales, o.ranks) : measured_scale(o.rule, sum, count);
    finish_record(o.out + at, o.block, count, scale);
    each_go_of_record(count, [&](const auto& go) {
      each_of_go(
          go, [&](int64_t i, NoRows) { return left[i]; },
          [&](const Place& place, W total, NoRows) {
            const W x = less_value(total, signed_step(sign_bit(total), W(scale)), false);
            left[place.i] = is_finite(x) ? x : W(0);
          });
    });
  }
}

// What the elements of a record share: its bits, what they stand for, and what this rank sent for its own.
template <class W> struct RecordRow {
  const uint8_t* record;
  int64_t begin;
  W out, own;
};

template <class T> struct RecordElement {
  T grad;
  Work<T> residual;
  uint8_t bits;
};

template <class T> __global__ void record_decode_kernel(RecordDecode<T> o) {
  using W = Work<T>;
  const auto of_row = [&](int64_t index) {
    const uint8_t* record = o.records + index * record_bytes(o.block);
    return RecordRow<W>{record, index * o.block, W(scale_of_record(record)) * W(o.scale), W(o.scales[index])};
  };
  const auto body = [&](const auto& go) {
    each_of_go(
        go,
        [&](int64_t i, const RecordRow<W>& row) {
          return RecordElement<T>{o.grad[i], o.residual[i],
                                  byte_of_bits(row.record, go.first - row.begin, i - row.begin)};
        },
        [&](const Place& place, const RecordElement<T>& e, const RecordRow<W>& row) {
          const W x = to_work(e.grad) + e.residual;
          o.residual[place.i] = less_value(x, signed_step(sign_bit(x), row.own), false);
          o.grad[place.i] = from_work<T>(signed_step(record_bit(e.bits), row.out));
        });
  };
  each_go_of(o.count, {o.block, o.count}, of_row, body);
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void record_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t block, ScaleRule rule,
                  uint8_t* records, int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RecordOffer<T> o{
        static_cast<const T*>(grad), static_cast<const Work<T>*>(residual), count, block, rule, records};
    start(record_offer_kernel<T>, ceil_div(count, block) * kWarp, launch, o, nonfinite);
  });
}

void record_fold(const uint8_t* const* parts, int64_t ranks, Dtype dtype, int64_t count, int64_t block, ScaleRule rule,
                 const void* kept, void* left, uint8_t* out, Launch launch) {
  if (count == 0) return;
  const Parts<uint8_t> listed(parts, ranks, launch);
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const Fold<W> o{listed.list(), ranks, count, block, rule, static_cast<const W*>(kept), static_cast<W*>(left), out};
    start(record_fold_kernel<W>, ceil_div(count, block) * kWarp, launch, o);
  });
}

void record_decode(const uint8_t* records, const float* scales, Dtype dtype, int64_t count, int64_t block, double scale,
                   void* grad, void* residual, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RecordDecode<T> o{
        records, scales, count, block, scale, static_cast<T*>(grad), static_cast<Work<T>*>(residual)};
    start(record_decode_kernel<T>, units_of_goes(count) * kWarp, launch, o);
  });
}

}  // namespace hvc
