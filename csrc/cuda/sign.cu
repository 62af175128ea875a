// One bit per element: packing, the fused offer, the fused decode.
#include "hvc/tree.h"
#include "launch.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- helpers ----------------------------------------------------------------------------------------------

// A key that may be absent, passed by value.
struct Coins {
  explicit Coins(const Stream* key, int64_t word_offset)
      : present(key != nullptr), stream(key ? *key : Stream{}), word_offset(word_offset) {}
  bool present;
  Stream stream;
  int64_t word_offset;
};

template <class T> struct Offer {
  const T* grad;
  const Work<T>* residual;
  int64_t count, row_length;
  Coins coins;
  uint32_t* halves;  // the bits, 32 at a time: what a warp votes on
  bool whole_halves;
  double* block_sums;
  int64_t* nonfinite;
};

template <class T> struct Decode {
  const uint64_t* bits;
  const float* steps;
  int64_t count, row_length;
  Feedback feedback;
  double decay, scale;
  Coins coins;
  T* grad;
  Work<T>* residual;
};

template <class T> __device__ Work<T> offered(const T* grad, const Work<T>* residual, int64_t i) {
  const Work<T> x = to_work(grad[i]);
  return residual ? x + residual[i] : x;
}

template <class W> __device__ bool own_bit(W x, const Coins& coins, int64_t i) {
  if (!coins.present || x != 0) return sign_bit(x);
  return random_word(coins.stream, coins.word_offset + i / kWordBits, 0) >> (i % kWordBits) & 1;
}

// Divisions of 64 bits are slow, and most tensors need none.
__device__ inline int64_t row_of(int64_t i, int64_t row_length, int64_t count) {
  if (row_length >= count) return 0;
  return count <= 0xffffffff ? int64_t(uint32_t(i) / uint32_t(row_length)) : i / row_length;
}

// Blocks of all rows, in order; hvc/tree.h says what a block is.
struct Blocks {
  int64_t per_row, total;
};
__host__ __device__ inline Blocks blocks_of(int64_t count, int64_t row_length) {
  const int64_t per_row = ceil_div(row_length, kBlock);
  return {per_row, count / row_length * per_row + ceil_div(count % row_length, kBlock)};
}

// Writes 32 bits from element `begin` on, in cleared memory where rows do not begin at a multiple of 32.
__device__ inline void put_bits(uint32_t* halves, int64_t begin, uint32_t bits, bool whole_halves) {
  const int shift = int(begin % kWarp);
  if (whole_halves) {
    halves[begin / kWarp] = bits;
    return;
  }
  atomicOr(halves + begin / kWarp, bits << shift);
  if (shift != 0 && bits >> (kWarp - shift) != 0) atomicOr(halves + begin / kWarp + 1, bits >> (kWarp - shift));
}

template <class W> __device__ W combine_warp(W lane) {
  for (int half = kWarp / 2; half > 0; half /= 2) lane += __shfl_down_sync(kAllLanes, lane, half);
  return lane;
}

// ---- kernels ----------------------------------------------------------------------------------------------

template <class T> __global__ void pack_kernel(const T* x, int64_t count, uint32_t* halves) {
  for (int64_t half = first_warp(); half < 2 * words_for(count); half += warp_stride()) {
    const int64_t i = half * kWarp + lane_index();
    const uint32_t bits = __ballot_sync(kAllLanes, i < count && sign_bit(to_work(x[i])));
    if (lane_index() == 0) halves[half] = bits;
  }
}

// A warp sums a block of 1024 elements, lane by lane, as the tree says.
template <class T> __global__ void offer_kernel(Offer<T> o) {
  const Blocks blocks = blocks_of(o.count, o.row_length);
  int64_t nonfinite = 0;
  for (int64_t block = first_warp(); block < blocks.total; block += warp_stride()) {
    const int64_t row = block / blocks.per_row * o.row_length;
    const int64_t row_end = row + o.row_length < o.count ? row + o.row_length : o.count;
    const int64_t begin = row + block % blocks.per_row * kBlock;
    const int64_t end = begin + kBlock < row_end ? begin + kBlock : row_end;
    Work<T> sum = 0;
    for (int64_t group = begin; group < end; group += kWarp) {
      const int64_t i = group + lane_index();
      const Work<T> x = i < end ? offered(o.grad, o.residual, i) : Work<T>(0);
      const uint32_t bits = __ballot_sync(kAllLanes, i < end && own_bit(x, o.coins, i));
      if (lane_index() == 0) put_bits(o.halves, group, bits, o.whole_halves);
      sum += magnitude(x);
      nonfinite += !is_finite(x);
    }
    sum = combine_warp(sum);
    if (o.block_sums && lane_index() == 0) o.block_sums[block] = double(sum);
  }
  add_count(o.nonfinite, nonfinite);
}

__global__ void add_blocks_kernel(Units units, const double* block_sums, double* unit_sums) {
  const Blocks blocks = blocks_of(units.count, units.row_length);
  constexpr int64_t kBlocks = kSuperblock / kBlock;
  for (int64_t unit = first_item(); unit < units.total; unit += item_stride()) {
    const int64_t row = unit / units.per_row * blocks.per_row, begin = row + unit % units.per_row * kBlocks;
    const int64_t end = min(min(begin + kBlocks, row + blocks.per_row), blocks.total);
    double sum = 0;
    for (int64_t block = begin; block < end; ++block) sum += block_sums[block];
    unit_sums[unit] = sum;
  }
}

__global__ void add_superblocks_kernel(Units units, const double* unit_sums, double* sums) {
  const int64_t rows = ceil_div(units.count, units.row_length);
  for (int64_t row = first_item(); row < rows; row += item_stride()) {
    const int64_t begin = row * units.per_row, end = min(begin + units.per_row, units.total);
    double sum = 0;
    for (int64_t unit = begin; unit < end; ++unit) sum += unit_sums[unit];
    sums[row] = canonical(sum);
  }
}

template <class T> __global__ void decode_kernel(Decode<T> d) {
  using W = Work<T>;
  for (int64_t i = first_item(); i < d.count; i += item_stride()) {
    const bool bit = d.bits[i / kWordBits] >> (i % kWordBits) & 1;
    const W step = d.steps[row_of(i, d.row_length, d.count)];
    if (d.feedback != kFeedbackNone) {
      const W x = offered(d.grad, d.residual, i);
      const bool kept = d.feedback == kFeedbackGlobal ? bit : own_bit(x, d.coins, i);
      d.residual[i] = (x - signed_step(kept, step)) * W(d.decay);
    }
    d.grad[i] = from_work<T>(signed_step(bit, step * W(d.scale)));
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

template <class T> void run_offer(Offer<T> offer, double* sums, Launch launch) {
  const Units units = units_of(offer.count, offer.row_length);
  const int64_t blocks = blocks_of(offer.count, offer.row_length).total;
  const Scratch<double> block_sums(sums ? blocks : 0, launch), unit_sums(sums ? units.total : 0, launch);
  offer.block_sums = block_sums.get();
  start(offer_kernel<T>, blocks * kWarp, launch, offer);
  if (!sums) return;
  start(add_blocks_kernel, units.total, launch, units, block_sums.get(), unit_sums.get());
  start(add_superblocks_kernel, ceil_div(units.count, units.row_length), launch, units, unit_sums.get(), sums);
}

}  // namespace

void sign_pack(const void* x, Dtype dtype, int64_t count, uint64_t* bits, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    start(pack_kernel<T>, 2 * words_for(count) * kWarp, launch, static_cast<const T*>(x), count,
          reinterpret_cast<uint32_t*>(bits));
  });
}

void sign_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t row_length,
                const Stream* key, int64_t word_offset, uint64_t* bits, double* sums, int64_t* nonfinite,
                Launch launch) {
  clear(nonfinite, sizeof *nonfinite, launch);
  clear(bits, words_for(count) * int64_t(sizeof *bits), launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool whole_halves = row_length % kWarp == 0 || row_length >= count;
    const Offer<T> offer{static_cast<const T*>(grad),
                         static_cast<const Work<T>*>(residual),
                         count,
                         row_length,
                         Coins(key, word_offset),
                         reinterpret_cast<uint32_t*>(bits),
                         whole_halves,
                         nullptr,
                         nonfinite};
    run_offer(offer, sums, launch);
  });
}

void sign_decode(const uint64_t* bits, const float* steps, Dtype dtype, int64_t count, int64_t row_length,
                 Feedback feedback, double decay, double scale, const Stream* key, int64_t word_offset, void* grad,
                 void* residual, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Coins coins(key, word_offset);
    const Decode<T> decode{bits,
                           steps,
                           count,
                           row_length,
                           feedback,
                           decay,
                           scale,
                           coins,
                           static_cast<T*>(grad),
                           static_cast<Work<T>*>(residual)};
    start(decode_kernel<T>, count, launch, decode);
  });
}

void sign_unpack(const uint64_t* bits, const float* steps, Dtype dtype, int64_t count, int64_t row_length,
                 double scale, void* out, Launch launch) {
  sign_decode(bits, steps, dtype, count, row_length, kFeedbackNone, 1, scale, nullptr, 0, out, nullptr, launch);
}

}  // namespace hvc
