// Positions of kept elements with a value for each, in ranges that decode apart from each other.
//
//   section   a head: with kSigns the mean, of the arithmetic type, with codes the levels of rules/codebook.h, float32;
//             two uint32 for each range: the bytes of its stream and the number of its positions; then the ranges, one
//             after the other without gaps
//   range     2^(b+11) consecutive elements, as in golomb.h: its stream, then its values in the order of positions
//   values    numbers of the arithmetic type, or of float16 or bfloat16; or a bit for each, lowest first: 1 is -mean,
//             0 is +mean; or codes, lowest first. The last byte is filled with zeros
//
// So the lengths at the start say where every range's values lie, and no stream has to be read for it. A range is
// malformed where it leaves the section, where its stream is malformed by the rules of golomb.h, or has more or fewer
// positions than were said.
#pragma once
#include "rules/codebook.h"
#include "rules/golomb.h"
#include "rules/half.h"

namespace hvc {

enum ValueForm : int {
  kFullValues = 0,
  kHalfValues = 1,
  kBFloat16Values = 2,
  kSigns = 3,
  kCodes2 = 4,
  kCodes4 = 5,
  kCodes8 = 6
};

// The bits of a code; 0 where there are none.
HVC_RULE constexpr int code_bits(ValueForm form) {
  return form == kCodes2 ? 2 : form == kCodes4 ? 4 : form == kCodes8 ? 8 : 0;
}
HVC_RULE int64_t head_bytes(ValueForm form, int work_bytes) {
  return form == kSigns ? work_bytes : code_bits(form) ? 4 * codebook_levels(code_bits(form)) : 0;
}
HVC_RULE int64_t bytes_of_values(ValueForm form, int work_bytes, int64_t number) {
  if (form == kSigns || code_bits(form)) return ceil_div(number * (form == kSigns ? 1 : code_bits(form)), 8);
  return number * (form == kFullValues ? work_bytes : 2);
}
HVC_RULE int64_t ranges_begin(ValueForm form, int work_bytes, int64_t ranges) {
  return head_bytes(form, work_bytes) + 8 * ranges;
}

HVC_RULE void store_short(uint8_t* into, uint16_t value) {
  into[0] = uint8_t(value);
  into[1] = uint8_t(value >> 8);
}

// Rounded to nearest even; what would be infinite is the largest number: the residual keeps the rest. The sign is that
// of a comparison, which gives none to NaN: its own depends on the processor.
template <class W> HVC_RULE Half half_of(W value) {
  const Half h = from_work<Half>(value);
  return is_finite(h) ? h : Half{uint16_t(value < 0 ? 0xfbffu : 0x7bffu)};
}
template <class W> HVC_RULE BFloat16 bfloat16_of(W value) {
  const BFloat16 h = from_work<BFloat16>(value);
  return is_finite(h) ? h : BFloat16{uint16_t(value < 0 ? 0xff7fu : 0x7f7fu)};
}

// One value of a range, by the form; `levels` are those of codes.
template <ValueForm kForm, class W>
HVC_RULE void put_value(uint8_t* values, int64_t index, W value, const float* levels) {
  if constexpr (kForm == kFullValues)
    memcpy(values + index * int64_t(sizeof(W)), &value, sizeof(W));
  else if constexpr (kForm == kHalfValues)
    store_short(values + 2 * index, half_of(value).bits);
  else if constexpr (kForm == kBFloat16Values)
    store_short(values + 2 * index, bfloat16_of(value).bits);
  else if constexpr (kForm == kSigns)
    values[index / 8] = uint8_t((index % 8 ? values[index / 8] : 0) | (value < 0) << (index % 8));
  else {
    constexpr int kBits = code_bits(kForm), kInByte = 8 / kBits;
    const unsigned code = code_of<kBits>(levels, value) << (kBits * (index % kInByte));
    values[index / kInByte] = uint8_t((index % kInByte ? values[index / kInByte] : 0) | code);
  }
}

// What stands at the head of a section, for all of its values.
template <class W> struct ForAll {
  W mean;
  const uint8_t* levels;
};
template <ValueForm kForm, class W>
HVC_RULE W value_at(const uint8_t* values, int64_t index, const ForAll<W>& for_all) {
  if constexpr (kForm == kFullValues) {
    W value;
    memcpy(&value, values + index * int64_t(sizeof(W)), sizeof(W));
    return value;
  } else if constexpr (kForm == kHalfValues) {
    return to_float(Half{load_bytes<uint16_t>(values + 2 * index)});
  } else if constexpr (kForm == kBFloat16Values) {
    return to_float(BFloat16{load_bytes<uint16_t>(values + 2 * index)});
  } else if constexpr (kForm == kSigns) {
    return (values[index / 8] >> (index % 8) & 1) != 0 ? -for_all.mean : for_all.mean;
  } else {
    constexpr int kBits = code_bits(kForm), kInByte = 8 / kBits, kLevels = 1 << (kBits - 1);
    const int code = values[index / kInByte] >> (kBits * (index % kInByte)) & (2 * kLevels - 1);
    const W level = bit_cast<float>(load_bytes<uint32_t>(for_all.levels + 4 * (code & (kLevels - 1))));
    return code & kLevels ? -level : level;
  }
}

// The ranges of one section, in order. Reads nothing outside the section, whatever the bytes are.
template <class W> struct ValueCursor {
  Section section;
  ValueForm form;
  int parameter;
  int64_t count;
  bool readable;
  ForAll<W> for_all;
  int64_t offset;  // where the next range begins
  GolombReader reader;
  const uint8_t* values;
  int64_t number, index;  // how many values the range has, and which is the next

  HVC_RULE uint32_t length(int64_t range, int which) const {
    return load_bytes<uint32_t>(section.data + head_bytes(form, sizeof(W)) + 8 * range + 4 * which);
  }
  HVC_RULE int64_t range_bytes(int64_t range) const {
    return length(range, 0) + bytes_of_values(form, sizeof(W), length(range, 1));
  }
  HVC_RULE void open(int64_t range) {
    reader = GolombReader::broken();
    number = index = 0;
    if (!readable) return;
    const int64_t at = offset, stream = length(range, 0);
    offset += range_bytes(range);
    if (offset > section.bytes) return;
    const int64_t begin = range * range_elements(parameter), end = begin + range_elements(parameter);
    reader = GolombReader(section.data + at, stream, parameter, begin, end < count ? end : count);
    values = section.data + at + stream;
    number = length(range, 1);
  }
  HVC_RULE bool malformed() const { return reader.malformed() || index != number; }
};

template <class W> HVC_RULE ValueCursor<W> value_cursor(const Section& section, ValueForm form, int parameter,
                                                        int64_t count, int64_t range) {
  const int64_t begin = ranges_begin(form, sizeof(W), ranges_for(count, parameter));
  ValueCursor<W> cursor{section, form,    parameter, count, section.bytes >= begin, {W(0), section.data}, begin,
                        {},      nullptr, 0,         0};
  if (!cursor.readable) return cursor;
  if (form == kSigns) cursor.for_all.mean = section_value<W>(section);
  for (int64_t before = 0; before < range; ++before) cursor.offset += cursor.range_bytes(before);
  return cursor;
}

}  // namespace hvc
