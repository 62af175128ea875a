// Sections of Golomb codes for the positions of one value.
#include "rules/golomb.h"

#include "rules/half.h"
#include "positions.h"
#include "sections.h"
#include "streams.h"
#include "visit.h"

namespace hvc {
namespace {

// Only streams, and one value of type W for all positions.
struct NoPut {
  __device__ bool load(int64_t) const { return false; }
  __device__ void operator()(uint8_t*, int64_t, bool, bool) const {}
};
template <class W> struct NoValues {
  static constexpr int kNumbers = 1;
  static __host__ __device__ int64_t value_bytes(const Given&) { return sizeof(W); }
  static __device__ int64_t bytes(const Given&, int64_t) { return 0; }
  template <class Use> static __device__ void with_put(const Given&, const Use& use) { use(NoPut{}); }
};

struct StreamBytes {
  int value_bytes;
  __device__ int64_t operator()(const Section& s, int64_t range) const { return stream_bytes(s, value_bytes, range); }
};

// Calls use(index, position in the range) for all positions of a range.
template <class W, class Use> __device__ Read read_range(Piece& piece, const Batch<W>& batch, int parameter,
                                                         int64_t part, int64_t range, const Use& use) {
  const Section& s = batch.parts[part].section;
  const int64_t at = streams_begin(sizeof(W), batch.cut.number) + batch.offsets[part * batch.cut.number + range];
  const int64_t bytes = stream_bytes(s, sizeof(W), range);
  if (at + bytes > s.bytes) return {0, true};
  const int64_t elements = batch.cut.end(range) - batch.cut.begin(range);
  return each_position(piece, {s.data + at, bytes, parameter, 0, elements}, use);
}

template <class W> __global__ void lists_kernel(const __grid_constant__ Batch<W> batch, int parameter, int64_t* wrong) {
  __shared__ Piece piece;
  const int64_t ranges = batch.cut.number;
  for (int64_t item = first_warp(); item < batch.size * ranges; item += warp_stride()) {
    const int64_t part = item / ranges, range = item % ranges;
    const W value = section_value<W>(batch.parts[part].section);
    const int64_t first = batch.first_entry(part, range);
    Entry<W>* const list = batch.entries + first;
    const Read read = read_range(piece, batch, parameter, part, range,
                                 [&](int64_t index, int64_t position) { list[index] = {int32_t(position), value}; });
    if (lane_index() != 0) continue;
    batch.lists[item] = {first, read.number};
    add_count(wrong, read.malformed);
  }
}

template <class T>
__global__ void clear_kernel(const __grid_constant__ Batch<Work<T>> batch, int parameter, T* tensor, int64_t* wrong) {
  __shared__ Piece piece;
  for (int64_t range = first_warp(); range < batch.cut.number; range += warp_stride()) {
    T* const elements = tensor + batch.cut.begin(range);
    const Read read =
        read_range(piece, batch, parameter, 0, range, [&](int64_t, int64_t position) { elements[position] = T{}; });
    if (lane_index() == 0) add_count(wrong, read.malformed);
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

Cut cut_of(int parameter, int64_t count) { return {count, range_elements(parameter), ranges_for(count, parameter)}; }

Form<StreamBytes> form_of(int value_bytes, int parameter, const Cut& cut) {
  return {streams_begin(value_bytes, cut.number), parameter + 1, {value_bytes}};
}

// A warp for each range, in a block of its own.
int64_t warps_for(int64_t ranges) { return std::min(ranges, kMostBlocks); }

}  // namespace

void binary_encode(const BinaryEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t* ends, uint8_t* out,
                   int64_t room, Launch launch) {
  std::vector<Given> all;
  for (const BinaryEncoded* t = tensors; t != tensors + tensor_count; ++t)
    all.push_back({t->positions, t->kept, nullptr, t->mean, 0, t->elements, t->parameter, 0});
  visit_work(dtype,
             [&](auto type) { write_sections<NoValues<typename decltype(type)::type>>(all, ends, out, room, launch); });
}

void binary_decode(const Section* sections, int64_t section_count, int64_t own, int parameter, Dtype dtype,
                   int64_t count, double scale, void* grad, void* residual, int64_t* wrong, Launch launch) {
  const Cut cut = cut_of(parameter, count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    Settle<T> settle{};
    settle.scale = W(scale);
    settle.grad = static_cast<T*>(grad);
    settle.residual = static_cast<W*>(residual);
    add_sections(sections, section_count, own, cut, form_of(sizeof(W), parameter, cut), settle, wrong, launch,
                 [&](const Batch<W>& batch) {
                   const int64_t ranges = batch.size * cut.number;
                   if (ranges > 0)
                     start_blocks(lists_kernel<W>, warps_for(ranges), kWarp, launch, batch, parameter, wrong);
                 });
  });
}

void binary_clear(const Section* section, int parameter, Dtype dtype, int64_t count, void* tensor, int64_t* wrong,
                  Launch launch) {
  const Cut cut = cut_of(parameter, count);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto form = form_of(sizeof(W), parameter, cut);
    if (section->bytes < form.head) return count_all_ranges(cut, wrong, launch);
    if (cut.number == 0) return;
    with_batch<W>(&section, 1, cut, form, 0, launch, [&](const Batch<W>& batch) {
      start_blocks(clear_kernel<T>, warps_for(cut.number), kWarp, launch, batch, parameter, static_cast<T*>(tensor),
                   wrong);
    });
  });
}

}  // namespace hvc
