// Sections of positions with a value for each.
#include "rules/values.h"

#include "positions.h"
#include "streams.h"
#include "turns.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- encoding ---------------------------------------------------------------------------------------------

// A lane writes a value; signs of a warp are its vote, of which four lanes write a byte. Of the codes that share a byte
// the first lane writes them.
template <ValueForm kForm, class W> struct PutValue {
  const W* values;
  const float* levels;
  __device__ W load(int64_t i) const { return values[i]; }
  __device__ void operator()(uint8_t* into, int64_t j, W value, bool there) const {
    if constexpr (kForm == kSigns) {
      const unsigned signs = __ballot_sync(kAllLanes, there && value < 0);
      const unsigned lanes = __ballot_sync(kAllLanes, there);
      const int byte = lane_index();
      if (byte < 4 && lanes >> (8 * byte) != 0) into[(j - byte) / 8 + byte] = uint8_t(signs >> (8 * byte));
    } else if constexpr (code_bits(kForm) != 0) {
      constexpr int kBits = code_bits(kForm), kInByte = 8 / kBits;
      const int place = lane_index() % kInByte;
      unsigned byte = there ? code_of<kBits>(levels, value) << (kBits * place) : 0;
      for (int step = 1; step < kInByte; step *= 2) byte |= __shfl_down_sync(kAllLanes, byte, step);
      if (there && place == 0) into[j / kInByte] = uint8_t(byte);
    } else {
      if (there) put_value<kForm>(into, j, value, levels);
    }
  }
};

// Calls body(a constant of that form).
template <class Body> __device__ void with_form(ValueForm form, const Body& body) {
  switch (form) {
    case kFullValues:
      return body(std::integral_constant<ValueForm, kFullValues>());
    case kHalfValues:
      return body(std::integral_constant<ValueForm, kHalfValues>());
    case kBFloat16Values:
      return body(std::integral_constant<ValueForm, kBFloat16Values>());
    case kSigns:
      return body(std::integral_constant<ValueForm, kSigns>());
    case kCodes2:
      return body(std::integral_constant<ValueForm, kCodes2>());
    case kCodes4:
      return body(std::integral_constant<ValueForm, kCodes4>());
    case kCodes8:
      return body(std::integral_constant<ValueForm, kCodes8>());
  }
}

// What the sections of values of type W have beside streams.
template <class W> struct WithValues {
  static constexpr int kNumbers = 2;
  static __host__ __device__ int64_t value_bytes(const Given& g) { return head_bytes(ValueForm(g.form), sizeof(W)); }
  static __device__ int64_t bytes(const Given& g, int64_t number) {
    return bytes_of_values(ValueForm(g.form), sizeof(W), number);
  }
  template <class Use> static __device__ void with_put(const Given& g, const Use& use) {
    with_form(ValueForm(g.form), [&](auto form) {
      use(PutValue<decltype(form)::value, W>{static_cast<const W*>(g.values), static_cast<const float*>(g.head)});
    });
  }
};

// ---- decoding ---------------------------------------------------------------------------------------------

struct RangeBytes {
  int work_bytes;
  __device__ int64_t operator()(const Section& s, const Form& form, int64_t range) const {
    const auto values = ValueForm(form.values);
    const uint8_t* lengths = s.data + head_bytes(values, work_bytes) + 8 * range;
    return load_bytes<uint32_t>(lengths) + bytes_of_values(values, work_bytes, load_bytes<uint32_t>(lengths + 4));
  }
};

template <class W>
__device__ W value_as(ValueForm form, const uint8_t* values, int64_t index, const ForAll<W>& for_all) {
  W value(0);
  with_form(form, [&](auto constant) { value = value_at<decltype(constant)::value, W>(values, index, for_all); });
  return value;
}

template <class T, class Table>
__global__ void lists_kernel(const __grid_constant__ Table table, Lists<Work<T>> lists) {
  using W = Work<T>;
  __shared__ Piece piece;
  each_range(table, first_warp(), warp_stride(), [&](const Summed<T>& t, int64_t part, int64_t range) {
    const Section& s = lists.section(t, part);
    const auto form = ValueForm(t.form.values);
    const int parameter = int(t.form.parameter);
    ValueCursor<W> cursor = value_cursor<W>(s, form, parameter, t.cut.count, 0);
    const int64_t at = cursor.offset + lists.offsets[t.range_of(part, range)], stream = cursor.length(range, 0);
    const bool readable = at + cursor.range_bytes(range) <= s.bytes;
    const int64_t number = readable ? cursor.length(range, 1) : 0;
    const uint8_t* const values = s.data + at + stream;
    const int64_t first = lists.first_entry(t, part, range);
    Entry<W>* const list = lists.entries + first;
    Read read{0, true};
    if (readable)
      read = each_position(piece, {s.data + at, stream, parameter, 0, t.cut.end(range) - t.cut.begin(range)},
                           [&](int64_t index, int64_t position) {
                             if (index < number)
                               list[index] = {int32_t(position), value_as<W>(form, values, index, cursor.for_all)};
                           });
    if (lane_index() != 0) return;
    lists.lists[t.range_of(part, range)] = {first, min(read.number, number)};
    add_count(t.wrong, read.malformed || read.number != number);
  });
}

// ---- launchers --------------------------------------------------------------------------------------------

int64_t bits_of_entry(ValueForm form, int work_bytes, int parameter) {
  const int coded = form == kSigns ? 1 : code_bits(form);
  return parameter + 1 + (coded ? coded : 8 * bytes_of_values(form, work_bytes, 1));
}

}  // namespace

void values_encode(const ValuesEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t* ends, uint8_t* out,
                   int64_t room, Launch launch) {
  std::vector<Given> all;
  for (const ValuesEncoded* t = tensors; t != tensors + tensor_count; ++t)
    all.push_back({t->positions, t->kept, t->values, t->head, t->form, t->elements, t->parameter, 0});
  visit_work(dtype, [&](auto type) {
    write_sections<WithValues<typename decltype(type)::type>>(all, ends, out, room, launch);
  });
}

void values_decode(const ValuesDecoded* tensors, int64_t tensor_count, Dtype dtype, const Section* sections,
                   int64_t ranks, int64_t own, double scale, double factor, bool masking, double decay, bool by_senders,
                   int64_t* wrong, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    std::vector<Summed<T>> all;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const ValuesDecoded& d = tensors[i];
      const int parameter = int(d.parameter);
      const auto form = ValueForm(d.form);
      Summed<T> t{};
      t.cut = {d.count, range_elements(parameter), ranges_for(d.count, parameter)};
      t.form = {ranges_begin(form, sizeof(W), t.cut.number), bits_of_entry(form, sizeof(W), parameter), d.form,
                d.parameter};
      t.grad = static_cast<T*>(d.grad);
      t.residual = static_cast<W*>(d.residual);
      t.momentum = static_cast<W*>(d.momentum);
      t.wrong = wrong + i;
      all.push_back(t);
    }
    const Settle<T> settle{W(scale), W(factor), W(decay), masking, by_senders};
    add_sections<true>(all, sections, ranks, own, settle, RangeBytes{sizeof(W)}, launch,
                       [&](const auto& table, const Lists<W>& lists) {
                         start_blocks(lists_kernel<T, std::decay_t<decltype(table)>>,
                                      std::min(table.units(), kMostBlocks), kWarp, launch, table, lists);
                       });
  });
}

}  // namespace hvc
