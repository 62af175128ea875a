// Signs with a scale for each block: the fused offer, the fold of all ranks' records, and the fused decode.
#include "parts.h"
#include "record_operands.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class W> using Fold = RecordFold<W, PartList<uint8_t>>;

// ---- kernels ----------------------------------------------------------------------------------------------

// Records lie at any address: a lane writes a byte.
__device__ inline void put_record_bits(uint8_t* record, int64_t element, uint32_t bits) {
  if (lane_index() < 4) record[kScaleBytes + element / 8 + lane_index()] = uint8_t(bits >> 8 * lane_index());
}
__device__ inline bool record_bit(const uint8_t* record, int64_t element) {
  return record[kScaleBytes + element / 8] >> (element % 8) & 1;
}

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

// A warp makes one record.
template <class T> __global__ void record_offer_kernel(RecordOffer<T> o, int64_t* total) {
  using W = Work<T>;
  int64_t nonfinite = 0;
  for (int64_t index = first_warp(); index < ceil_div(o.count, o.block); index += warp_stride()) {
    const int64_t begin = index * o.block, end = begin + o.block < o.count ? begin + o.block : o.count;
    uint8_t* record = o.records + index * record_bytes(o.block);
    double sum = 0;
    for (int64_t group = begin; group < end; group += kWarp) {
      const int64_t i = group + lane_index();
      const W x = i < end ? offered(o.grad, o.residual, i) : W(0);
      put_record_bits(record, group - begin, __ballot_sync(kAllLanes, i < end && sign_bit(x)));
      nonfinite += !can_be_kept(x);
      sum += scale_term(o.rule, double(magnitude(x)));
    }
    finish_record(record, o.block, end - begin, measured_scale(o.rule, sum, end - begin));
  }
  add_count(total, nonfinite);
}

template <class W> __global__ void record_fold_kernel(Fold<W> o) {
  for (int64_t index = first_warp(); index < ceil_div(o.count, o.block); index += warp_stride()) {
    const int64_t begin = index * o.block, end = begin + o.block < o.count ? begin + o.block : o.count;
    const int64_t at = index * record_bytes(o.block);
    const auto sent = [&](int64_t rank, int64_t element) {
      const uint8_t* record = o.parts[rank] + at;
      const float scale = scale_of_record(record);
      return signed_step(record_bit(record, element), W(double(scale) / double(o.ranks)));
    };
    double scales = 0, sum = 0;
    for (int64_t rank = 0; rank < o.ranks; ++rank) scales += double(scale_of_record(o.parts[rank] + at));
    for (int64_t group = begin; group < end; group += kWarp) {
      const int64_t i = group + lane_index();
      W total = 0;
      if (i < end) {
        total = sent(0, i - begin);
        for (int64_t rank = 1; rank < o.ranks; ++rank) total += sent(rank, i - begin);
        total += o.kept[i];
        o.left[i] = total;
      }
      __syncwarp();  // all lanes have read the bits that are written now
      put_record_bits(o.out + at, group - begin, __ballot_sync(kAllLanes, i < end && sign_bit(total)));
      sum += scale_term(o.rule, double(magnitude(total)));
    }
    __syncwarp();  // and the scales
    const float scale =
        o.rule == kShared ? record_scale(kShared, scales, o.ranks) : measured_scale(o.rule, sum, end - begin);
    finish_record(o.out + at, o.block, end - begin, scale);
    for (int64_t i = begin + lane_index(); i < end; i += kWarp) {
      const W left = less_value(o.left[i], signed_step(sign_bit(o.left[i]), W(scale)), false);
      o.left[i] = is_finite(left) ? left : W(0);
    }
  }
}

template <class T> __global__ void record_decode_kernel(RecordDecode<T> o) {
  using W = Work<T>;
  for (int64_t i = first_item(); i < o.count; i += item_stride()) {
    const int64_t index = row_of(i, o.block, o.count);
    const uint8_t* record = o.records + index * record_bytes(o.block);
    const float scale = scale_of_record(record);
    const W x = offered(o.grad, o.residual, i), out = W(scale) * W(o.scale);
    o.residual[i] = less_value(x, signed_step(sign_bit(x), W(o.scales[index])), false);
    o.grad[i] = from_work<T>(signed_step(record_bit(record, i - index * o.block), out));
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void record_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t block, ScaleRule rule,
                  uint8_t* records, int64_t* nonfinite, Launch launch) {
  clear_counts(nonfinite, 1, launch);
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
    start(record_decode_kernel<T>, count, launch, o);
  });
}

}  // namespace hvc
