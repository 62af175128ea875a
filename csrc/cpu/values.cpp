// Sections of positions with values: written, and decoded and added up.
#include "rules/dense.h"
#include "rules/values.h"

#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

enum class Keeps { nothing, residual, decayed, momentum };

template <class T> struct ValueDecode {
  const Section* sections;
  int64_t number, own;
  ValueForm form;
  int parameter;
  int64_t count;
  Work<T> scale;
  T* grad;
  Work<T>* residual;
  Work<T>* momentum;
  Work<T> factor;
  bool masking;
  Work<T> decay;
  bool by_senders;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "values_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

struct Given {
  const int32_t* positions;
  int64_t kept, count;
  int parameter;
};

template <ValueForm kForm, class W>
int64_t encode(const Given& given, const W* values, const void* head, uint8_t* out) {
  const int64_t ranges = ranges_for(given.count, given.parameter), length = range_elements(given.parameter);
  if (head) memcpy(out, head, size_t(head_bytes(kForm, sizeof(W))));
  const auto* levels = static_cast<const float*>(code_bits(kForm) ? head : nullptr);
  uint8_t* lengths = out + head_bytes(kForm, sizeof(W));
  uint8_t* begin = lengths + 8 * ranges;
  int64_t i = 0;
  for (int64_t range = 0; range < ranges; ++range, lengths += 8) {
    StreamWriter writer(begin);
    int64_t next = range * length;
    const int64_t first = i, end = std::min(next + length, given.count);
    for (; i < given.kept && given.positions[i] < end; ++i) {
      if (given.positions[i] < next) return -1;
      writer.put_code(uint32_t(given.positions[i] - next), given.parameter);
      next = given.positions[i] + 1;
    }
    uint8_t* finished = writer.finish();
    for (int64_t j = first; j < i; ++j) put_value<kForm>(finished, j - first, values[j], levels);
    store_bytes(lengths, uint32_t(finished - begin));
    store_bytes(lengths + 4, uint32_t(i - first));
    begin = finished + bytes_of_values(kForm, sizeof(W), i - first);
  }
  return i == given.kept ? begin - out : -1;
}

template <class W>
int64_t encode_as(ValueForm form, const Given& given, const W* values, const void* head, uint8_t* out) {
  switch (form) {
    case kFullValues:
      return encode<kFullValues>(given, values, head, out);
    case kHalfValues:
      return encode<kHalfValues>(given, values, head, out);
    case kBFloat16Values:
      return encode<kBFloat16Values>(given, values, head, out);
    case kSigns:
      return encode<kSigns>(given, values, head, out);
    case kCodes2:
      return encode<kCodes2>(given, values, head, out);
    case kCodes4:
      return encode<kCodes4>(given, values, head, out);
    case kCodes8:
      return encode<kCodes8>(given, values, head, out);
  }
  return -1;
}

}  // namespace

void values_encode(const ValuesEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t* ends, uint8_t* out,
                   int64_t, Launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    for (const ValuesEncoded* t = tensors; t != tensors + tensor_count; ++t, ++ends) {
      const Given given{t->positions, t->kept, t->elements, int(t->parameter)};
      const auto* const values = static_cast<const W*>(t->values);
      put_end(ends[0] < 0 ? -1 : encode_as(ValueForm(t->form), given, values, t->head, out + ends[0]), ends);
    }
  });
}

void values_decode(const ValuesDecoded* tensors, int64_t tensor_count, Dtype dtype, const Section* sections,
                   int64_t ranks, int64_t own, double scale, double factor, bool masking, double decay, bool by_senders,
                   int64_t* wrong, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto decode = HVC_CHOOSE(decode_values<T>);
    for (const ValuesDecoded* t = tensors; t != tensors + tensor_count; ++t, sections += ranks, ++wrong) {
      const auto form = ValueForm(t->form);
      const int parameter = int(t->parameter);
      const int64_t number = ranges_for(t->count, parameter);
      const ValueDecode<T> d{sections,
                             ranks,
                             own,
                             form,
                             parameter,
                             t->count,
                             W(scale),
                             static_cast<T*>(t->grad),
                             static_cast<W*>(t->residual),
                             static_cast<W*>(t->momentum),
                             W(factor),
                             masking,
                             W(decay),
                             by_senders};
      const int64_t bytes = 2 * t->count * int64_t(sizeof(T) + sizeof(W) * (t->momentum ? 2 : 1));
      *wrong = 0;
      if (number == 0)
        for (int64_t i = 0; i < ranks; ++i) *wrong += sections[i].bytes < ranges_begin(form, sizeof(W), 0);
      *wrong += parallel_sum(launch.threads, number, bytes,
                             [&](int64_t first, int64_t last) { return decode(d, first, last); });
    }
  });
}

}  // namespace hvc
