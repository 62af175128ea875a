// Sections of Golomb codes: written, decoded and added up, and cleared.
#include "rules/golomb.h"

#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct SparseDecode {
  const Section* sections;
  int64_t number, own;
  int parameter;
  int64_t count;
  Work<T> scale;
  T* grad;
  Work<T>* residual;
};

// One section, whose ranges are read in order.
template <class W> struct SectionCursor {
  Section section;
  bool readable;
  W value;
  int64_t offset;
  GolombReader reader;

  void open(int parameter, int64_t count, int64_t range) {
    reader = GolombReader::broken();
    if (!readable) return;
    reader = reader_of(section, sizeof(W), parameter, count, range, offset);
    offset += stream_bytes(section, sizeof(W), range);
  }
};

template <class W> SectionCursor<W> cursor_at(const Section& section, int parameter, int64_t count, int64_t range) {
  const bool readable = !too_short(section, sizeof(W), ranges_for(count, parameter));
  int64_t offset = 0;
  for (int64_t before = 0; readable && before < range; ++before) offset += stream_bytes(section, sizeof(W), before);
  return {section, readable, readable ? section_value<W>(section) : W(0), offset, {}};
}

template <class W> std::vector<SectionCursor<W>> cursors_at(const Section* sections, int64_t number, int parameter,
                                                            int64_t count, int64_t range) {
  std::vector<SectionCursor<W>> cursors;
  for (int64_t i = 0; i < number; ++i) cursors.push_back(cursor_at<W>(sections[i], parameter, count, range));
  return cursors;
}

}  // namespace
}  // namespace hvc

#define HVC_BODY "golomb_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

template <class T>
int64_t clear_ranges(const Section& section, int parameter, int64_t count, T* tensor, int64_t first, int64_t last) {
  auto cursor = cursor_at<Work<T>>(section, parameter, count, first);
  int64_t wrong = 0;
  for (int64_t range = first; range < last; ++range) {
    cursor.open(parameter, count, range);
    GolombReader reader = cursor.reader;
    for (; reader.position() < count; reader.advance()) tensor[reader.position()] = T{};
    wrong += reader.malformed();
  }
  return wrong;
}

// Returns the bytes of a section, or -1.
int64_t write_section(const int32_t* positions, int64_t kept, const void* mean, int value_bytes, int64_t count,
                      int parameter, uint8_t* out) {
  const int64_t ranges = ranges_for(count, parameter);
  memcpy(out, mean, size_t(value_bytes));
  uint8_t* begin = out + streams_begin(value_bytes, ranges);
  int64_t i = 0;
  for (int64_t range = 0; range < ranges; ++range) {
    StreamWriter writer(begin);
    int64_t next = range * range_elements(parameter);
    const int64_t end = std::min(next + range_elements(parameter), count);
    for (; i < kept && positions[i] < end; ++i) {
      if (positions[i] < next) return -1;
      writer.put_code(uint32_t(positions[i] - next), parameter);
      next = positions[i] + 1;
    }
    uint8_t* finished = writer.finish();
    store_bytes(out + value_bytes + 4 * range, uint32_t(finished - begin));
    begin = finished;
  }
  return i == kept ? begin - out : -1;
}

}  // namespace

void binary_encode(const BinaryEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t* ends, uint8_t* out,
                   int64_t, Launch) {
  const int value_bytes = dtype == kFloat64 ? 8 : 4;
  for (const BinaryEncoded* t = tensors; t != tensors + tensor_count; ++t, ++ends) {
    put_end(ends[0] < 0 ? -1
                        : write_section(t->positions, t->kept, t->mean, value_bytes, t->elements, int(t->parameter),
                                        out + ends[0]),
            ends);
  }
}

void binary_decode(const BinaryDecoded* tensors, int64_t tensor_count, Dtype dtype, const Section* sections,
                   int64_t ranks, int64_t own, double scale, int64_t* wrong, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto decode = HVC_CHOOSE(decode_ranges<T>);
    for (const BinaryDecoded* t = tensors; t != tensors + tensor_count; ++t, sections += ranks, ++wrong) {
      const int parameter = int(t->parameter);
      const int64_t number = ranges_for(t->count, parameter), bytes = 2 * t->count * int64_t(sizeof(T) + sizeof(W));
      const SparseDecode<T> d{
          sections, ranks, own, parameter, t->count, W(scale), static_cast<T*>(t->grad), static_cast<W*>(t->residual)};
      *wrong = 0;
      if (number == 0)
        for (int64_t i = 0; i < ranks; ++i) *wrong += too_short(sections[i], sizeof(W), 0);
      *wrong += parallel_sum(launch.threads, number, bytes,
                             [&](int64_t first, int64_t last) { return decode(d, first, last); });
    }
  });
}

void binary_clear(const Section* section, int parameter, Dtype dtype, int64_t count, void* tensor, int64_t* wrong,
                  Launch launch) {
  *wrong = 0;
  const int64_t ranges = ranges_for(count, parameter);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (ranges == 0) *wrong = too_short(*section, sizeof(Work<T>), 0);
    *wrong += parallel_sum(launch.threads, ranges, count * int64_t(sizeof(T)), [&](int64_t first, int64_t last) {
      return clear_ranges(*section, parameter, count, static_cast<T*>(tensor), first, last);
    });
  });
}

}  // namespace hvc
