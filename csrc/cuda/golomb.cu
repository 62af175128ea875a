// Sections of Golomb codes for the positions of one value.
#include "rules/golomb.h"

#include "rules/half.h"
#include "positions.h"
#include "streams.h"
#include "turns.h"
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
  __device__ int64_t operator()(const Section& s, const Form&, int64_t range) const {
    return stream_bytes(s, value_bytes, range);
  }
};

// Calls use(index, position in the range) for all positions of a range.
template <class T, class Use> __device__ Read read_range(Piece& piece, const Summed<T>& t, const Lists<Work<T>>& lists,
                                                         int64_t part, int64_t range, const Use& use) {
  constexpr int kBytes = sizeof(Work<T>);
  const Section& s = lists.section(t, part);
  const int64_t at = streams_begin(kBytes, t.cut.number) + lists.offsets[t.range_of(part, range)];
  const int64_t bytes = stream_bytes(s, kBytes, range);
  if (at + bytes > s.bytes) return {0, true};
  const int64_t elements = t.cut.end(range) - t.cut.begin(range);
  return each_position(piece, {s.data + at, bytes, int(t.form.parameter), 0, elements}, use);
}

template <class T, class Table>
__global__ void lists_kernel(const __grid_constant__ Table table, Lists<Work<T>> lists) {
  using W = Work<T>;
  __shared__ Piece piece;
  each_range(table, first_warp(), warp_stride(), [&](const Summed<T>& t, int64_t part, int64_t range) {
    const W value = section_value<W>(lists.section(t, part));
    const int64_t first = lists.first_entry(t, part, range);
    Entry<W>* const list = lists.entries + first;
    const Read read = read_range(piece, t, lists, part, range,
                                 [&](int64_t index, int64_t position) { list[index] = {int32_t(position), value}; });
    if (lane_index() != 0) return;
    lists.lists[t.range_of(part, range)] = {first, read.number};
    add_count(t.wrong, read.malformed);
  });
}

template <class T, class Table>
__global__ void clear_kernel(const __grid_constant__ Table table, Lists<Work<T>> lists) {
  __shared__ Piece piece;
  each_range(table, first_warp(), warp_stride(), [&](const Summed<T>& t, int64_t part, int64_t range) {
    T* const elements = t.grad + t.cut.begin(range);
    const Read read =
        read_range(piece, t, lists, part, range, [&](int64_t, int64_t position) { elements[position] = T{}; });
    if (lane_index() == 0) add_count(t.wrong, read.malformed);
  });
}

// ---- launchers --------------------------------------------------------------------------------------------

template <class T> Summed<T> summed(int parameter, int64_t count, void* grad, void* residual, int64_t* wrong) {
  Summed<T> t{};
  t.cut = {count, range_elements(parameter), ranges_for(count, parameter)};
  t.form = {streams_begin(sizeof(Work<T>), t.cut.number), parameter + 1, 0, parameter};
  t.grad = static_cast<T*>(grad);
  t.residual = static_cast<Work<T>*>(residual);
  t.wrong = wrong;
  return t;
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

void binary_decode(const BinaryDecoded* tensors, int64_t tensor_count, Dtype dtype, const Section* sections,
                   int64_t ranks, int64_t own, double scale, int64_t* wrong, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    std::vector<Summed<T>> all;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const BinaryDecoded& d = tensors[i];
      all.push_back(summed<T>(int(d.parameter), d.count, d.grad, d.residual, wrong + i));
    }
    Settle<T> settle;
    settle.scale = W(scale);
    add_sections(all, sections, ranks, own, settle, StreamBytes{sizeof(W)}, launch,
                 [&](const auto& table, const Lists<W>& lists) {
                   start_blocks(lists_kernel<T, std::decay_t<decltype(table)>>, warps_for(table.units()), kWarp, launch,
                                table, lists);
                 });
  });
}

void binary_clear(const Section* section, int parameter, Dtype dtype, int64_t count, void* tensor, int64_t* wrong,
                  Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Turn<T> turn;
    turn.tensors.push_back(summed<T>(parameter, count, tensor, nullptr, wrong));
    const Cut& cut = turn.tensors.back().cut;
    if (section->bytes < turn.tensors.back().form.head) return count_all_ranges(cut, wrong, launch);
    turn.add(*section);
    turn.entries = 0;  // nothing is listed
    with_lists(turn, StreamBytes{sizeof(Work<T>)}, launch, [&](const Lists<Work<T>>& lists, const auto& tables) {
      tables([](const Summed<T>& t) { return t.cut.number; },
             [&](const auto& table) {
               start_blocks(clear_kernel<T, std::decay_t<decltype(table)>>, warps_for(table.units()), kWarp, launch,
                            table, lists);
             });
    });
  });
}

}  // namespace hvc
