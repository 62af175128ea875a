// Sections of positions with values: a thread codes a range. Ranks are added one after the other, so their order is
// kept.
#include "rules/values.h"

#include "rules/dense.h"
#include "positions.h"
#include "scan.h"
#include "visit.h"

namespace hvc {
namespace {

struct Given {
  const int32_t* positions;
  int64_t kept, count;
  int parameter;
};

// How long each range's stream is, which of the positions are in it, and where the range begins in the section.
struct Ranges {
  int64_t number;
  int64_t *streams, *firsts, *begins;
};

struct Reading {
  Section section;
  ValueForm form;
  int parameter;
  int64_t count, ranges;
};

template <class T> struct Settle {
  const Work<T>* sums;
  int64_t count;
  Work<T> scale;
  T* grad;
  Work<T>* residual;
  Work<T>* momentum;
  Work<T> factor;
};

template <class W> struct TakeOut {
  W* residual;
  W* momentum;
  W factor;
  bool masking;
};

// ---- encoding ---------------------------------------------------------------------------------------------

// `begins` gets the bytes of every range; sums of them are its places.
__global__ void measure_kernel(Given g, Ranges r, ValueForm form, int work_bytes) {
  for (int64_t range = first_item(); range <= r.number; range += item_stride()) {
    const int64_t first = first_from(g.positions, g.kept, range * range_elements(g.parameter));
    r.firsts[range] = first;
    r.begins[range] = 0;
    if (range == r.number) break;
    int64_t bits = 0, values = 0;
    each_gap(g.positions, g.kept, g.parameter, range, [&](uint32_t gap) {
      bits += bits_of_gap(gap, g.parameter);
      ++values;
    });
    r.streams[range] = ceil_div(bits, 8);
    r.begins[range] = r.streams[range] + bytes_of_values(form, work_bytes, values);
  }
}

// `lengths` lie before the ranges, which begin at `out`.
__global__ void streams_kernel(Given g, Ranges r, uint8_t* lengths, uint8_t* out) {
  for (int64_t range = first_item(); range < r.number; range += item_stride()) {
    StreamWriter writer(out + r.begins[range]);
    each_gap(g.positions, g.kept, g.parameter, range, [&](uint32_t gap) { writer.put_code(gap, g.parameter); });
    writer.finish();
    store_bytes(lengths + 8 * range, uint32_t(r.streams[range]));
    store_bytes(lengths + 8 * range + 4, uint32_t(r.firsts[range + 1] - r.firsts[range]));
  }
}

// A warp takes a range. A lane writes a value, and of signs those that share a byte.
template <ValueForm kForm, class W> __global__ void values_kernel(Ranges r, const W* values, uint8_t* out) {
  constexpr int64_t kTogether = kForm == kSigns ? 8 : 1;
  for (int64_t range = first_warp(); range < r.number; range += warp_stride()) {
    const int64_t first = r.firsts[range], number = r.firsts[range + 1] - first;
    uint8_t* into = out + r.begins[range] + r.streams[range];
    for (int64_t group = kTogether * lane_index(); group < number; group += kTogether * kWarp)
      for (int64_t j = group; j < min(group + kTogether, number); ++j) put_value<kForm>(into, j, values[first + j]);
  }
}

// ---- decoding ---------------------------------------------------------------------------------------------

template <class W> __global__ void lengths_kernel(Reading r, int64_t* bytes) {
  const ValueCursor<W> cursor = value_cursor<W>(r.section, r.form, r.parameter, r.count, 0);
  for (int64_t range = first_item(); range < r.ranges; range += item_stride()) bytes[range] = cursor.range_bytes(range);
}

// Calls use(position, value) for what a readable section holds. `begins` counts from the first range.
template <ValueForm kForm, class W, class Use>
__device__ void each_value(const Reading& r, const int64_t* begins, int64_t* wrong, const Use& use) {
  int64_t malformed = 0;
  ValueCursor<W> cursor = value_cursor<W>(r.section, kForm, r.parameter, r.count, 0);
  const int64_t head = cursor.offset;
  for (int64_t range = first_item(); range < r.ranges; range += item_stride()) {
    cursor.offset = head + begins[range];
    cursor.open(range);
    for (; cursor.reader.position() < r.count; cursor.reader.advance()) {
      if (cursor.index == cursor.number) {
        cursor.reader = GolombReader::broken();
        break;
      }
      use(cursor.reader.position(), value_at<kForm>(cursor.values, cursor.index++, cursor.mean));
    }
    malformed += cursor.malformed();
  }
  if (wrong) add_count(wrong, malformed);
}

template <ValueForm kForm, class W>
__global__ void add_kernel(Reading r, const int64_t* begins, W* sums, int64_t* wrong) {
  each_value<kForm, W>(r, begins, wrong, [&](int64_t position, W value) { sums[position] += value; });
}

// Writes the result, and what is kept as if nothing had been sent.
template <class T> __global__ void settle_kernel(Settle<T> s) {
  using W = Work<T>;
  for (int64_t i = first_item(); i < s.count; i += item_stride()) {
    if (s.residual) {
      const W grad = to_work(s.grad[i]);
      W x = grad + s.residual[i];
      if (s.momentum) {
        const W momentum = bounded(with_momentum(s.factor, s.momentum[i], grad));
        s.momentum[i] = momentum;
        x = bounded(W(x + s.factor * momentum));
      }
      s.residual[i] = x;
    }
    s.grad[i] = from_work<T>(W(s.sums[i] * s.scale));
  }
}

// Takes what was sent out of what is kept. With momentum the values are exact: nothing of x is left.
template <ValueForm kForm, class W> __global__ void take_out_kernel(Reading r, const int64_t* begins, TakeOut<W> t) {
  each_value<kForm, W>(r, begins, nullptr, [&](int64_t at, W value) {
    if (!t.momentum) {
      t.residual[at] -= value;
    } else {
      if (t.masking) t.momentum[at] = 0;
      t.residual[at] = t.factor * t.momentum[at];
    }
  });
}

// ---- launchers --------------------------------------------------------------------------------------------

// Calls body(a constant of that form).
template <class Body> void with_form(ValueForm form, const Body& body) {
  switch (form) {
    case kFullValues:
      return body(std::integral_constant<ValueForm, kFullValues>());
    case kHalfValues:
      return body(std::integral_constant<ValueForm, kHalfValues>());
    case kBFloat16Values:
      return body(std::integral_constant<ValueForm, kBFloat16Values>());
    case kSigns:
      return body(std::integral_constant<ValueForm, kSigns>());
  }
}

template <class W>
int64_t encode(const Given& g, const W* values, const W* mean, ValueForm form, uint8_t* out, Launch launch) {
  const int64_t ranges = ranges_for(g.count, g.parameter), head = ranges_begin(form, sizeof(W), ranges);
  // Behind the places of the ranges how many positions are wrong: fetched together with the bytes of all ranges.
  const Scratch<int64_t> streams(ranges, launch), firsts(ranges + 1, launch), begins(ranges + 2, launch);
  const Ranges r{ranges, streams.get(), firsts.get(), begins.get()};
  int64_t *total = begins.get() + ranges, *bad = total + 1;
  clear(bad, sizeof(int64_t), launch);
  start(validate_kernel, g.kept, launch, g.positions, g.kept, g.count, bad);
  start_spread(measure_kernel, ranges + 1, launch, g, r, form, int(sizeof(W)));
  prefix_sums(begins.get(), begins.get(), ranges + 1, launch);
  int64_t found[2];
  fetch(found, static_cast<const int64_t*>(total), 2, launch);
  if (found[1] != 0) return -1;
  if (form == kSigns)
    check(cudaMemcpyAsync(out, mean, sizeof(W), cudaMemcpyDeviceToDevice, stream_of(launch)), "cudaMemcpyAsync");
  start_spread(streams_kernel, ranges, launch, g, r, out + head_bytes(form, sizeof(W)), out + head);
  with_form(form, [&](auto f) { start(values_kernel<f(), W>, ranges * kWarp, launch, r, values, out + head); });
  return head + found[0];
}

// Where each range of a section begins, behind its head. A section without room for a head is known here; its ranges
// are counted as malformed.
template <class W> bool find_ranges(const Reading& r, int64_t* begins, int64_t* wrong, Launch launch) {
  if (r.section.bytes < ranges_begin(r.form, sizeof(W), r.ranges)) {
    if (wrong) start_blocks(count_kernel, 1, 1, launch, wrong, std::max<int64_t>(r.ranges, 1));
    return false;
  }
  start_spread(lengths_kernel<W>, r.ranges, launch, r, begins);
  prefix_sums(begins, begins, r.ranges, launch);
  return true;
}

}  // namespace

// Waits for its stream: its result is a number for the host.
int64_t values_encode(const int32_t* positions, int64_t kept, const void* values, const void* mean, Dtype dtype,
                      ValueForm form, int64_t count, int parameter, uint8_t* out, Launch launch) {
  int64_t used = -1;
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const Given given{positions, kept, count, parameter};
    used = encode(given, static_cast<const W*>(values), static_cast<const W*>(mean), form, out, launch);
  });
  return used;
}

void values_decode(const Section* sections, int64_t section_count, int64_t own, ValueForm form, int parameter,
                   Dtype dtype, int64_t count, double scale, void* grad, void* residual, void* momentum, double factor,
                   bool masking, int64_t* wrong, Launch launch) {
  clear_counts(wrong, 1, launch);
  const int64_t ranges = ranges_for(count, parameter);
  const Scratch<int64_t> begins(ranges, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Scratch<W> sums(count, launch);
    auto *kept = static_cast<W*>(residual), *velocity = static_cast<W*>(momentum);
    clear(sums.get(), count * int64_t(sizeof(W)), launch);
    const auto reading = [&](int64_t i) { return Reading{sections[i], form, parameter, count, ranges}; };
    with_form(form, [&](auto f) {
      for (int64_t i = 0; i < section_count; ++i)
        if (find_ranges<W>(reading(i), begins.get(), wrong, launch))
          start_spread(add_kernel<f(), W>, ranges, launch, reading(i), begins.get(), sums.get(), wrong);
      start(settle_kernel<T>, count, launch,
            Settle<T>{sums.get(), count, W(scale), static_cast<T*>(grad), kept, velocity, W(factor)});
      if (kept && find_ranges<W>(reading(own), begins.get(), nullptr, launch))
        start_spread(take_out_kernel<f(), W>, ranges, launch, reading(own), begins.get(),
                     TakeOut<W>{kept, velocity, W(factor), masking});
    });
  });
}

}  // namespace hvc
