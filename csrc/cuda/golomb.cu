// Sections of Golomb codes: a thread codes a range. Ranks are added one after the other, so their order is kept.
#include "rules/golomb.h"

#include "rules/half.h"
#include "positions.h"
#include "scan.h"
#include "visit.h"

namespace hvc {
namespace {

struct Layout {
  int value_bytes, parameter;
  int64_t count, ranges;
};

// ---- encoding ---------------------------------------------------------------------------------------------

__global__ void measure_kernel(const int32_t* positions, int64_t kept, Layout l, int64_t* lengths) {
  for (int64_t range = first_item(); range < l.ranges; range += item_stride()) {
    int64_t bits = 0;
    each_gap(positions, kept, l.parameter, range, [&](uint32_t gap) { bits += bits_of_gap(gap, l.parameter); });
    lengths[range] = ceil_div(bits, 8);
  }
}

__global__ void encode_kernel(const int32_t* positions, int64_t kept, Layout l, const int64_t* lengths,
                              const int64_t* offsets, uint8_t* out) {
  for (int64_t range = first_item(); range < l.ranges; range += item_stride()) {
    StreamWriter writer(out + streams_begin(l.value_bytes, l.ranges) + offsets[range]);
    each_gap(positions, kept, l.parameter, range, [&](uint32_t gap) { writer.put_code(gap, l.parameter); });
    writer.finish();
    store_bytes(out + l.value_bytes + 4 * range, uint32_t(lengths[range]));
  }
}

// ---- decoding ---------------------------------------------------------------------------------------------

__global__ void lengths_kernel(Section s, Layout l, int64_t* lengths) {
  for (int64_t range = first_item(); range < l.ranges; range += item_stride())
    lengths[range] = stream_bytes(s, l.value_bytes, range);
}

// Calls body(position) for each position of a readable section.
template <class Body> __device__ void each_position(const Section& s, const Layout& l, const int64_t* offsets,
                                                    int64_t* wrong, const Body& body) {
  int64_t malformed = 0;
  for (int64_t range = first_item(); range < l.ranges; range += item_stride()) {
    GolombReader reader = reader_of(s, l.value_bytes, l.parameter, l.count, range, offsets[range]);
    for (; reader.position() < l.count; reader.advance()) body(reader.position());
    malformed += reader.malformed();
  }
  if (wrong) add_count(wrong, malformed);
}

template <class W> __global__ void add_kernel(Section s, Layout l, const int64_t* offsets, W* sums, int64_t* wrong) {
  const W value = section_value<W>(s);
  each_position(s, l, offsets, wrong, [&](int64_t position) { sums[position] += value; });
}

template <class W> __global__ void subtract_kernel(Section s, Layout l, const int64_t* offsets, W* residual) {
  const W value = section_value<W>(s);
  each_position(s, l, offsets, nullptr, [&](int64_t position) { residual[position] -= value; });
}

template <class T>
__global__ void clear_kernel(Section s, Layout l, const int64_t* offsets, T* tensor, int64_t* wrong) {
  each_position(s, l, offsets, wrong, [&](int64_t position) { tensor[position] = T{}; });
}

template <class T>
__global__ void settle_kernel(const Work<T>* sums, int64_t count, Work<T> scale, T* grad, Work<T>* residual) {
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    if (residual) residual[i] = to_work(grad[i]) + residual[i];
    grad[i] = from_work<T>(sums[i] * scale);
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

Layout layout_of(int value_bytes, int parameter, int64_t count) {
  return {value_bytes, parameter, count, ranges_for(count, parameter)};
}

// Where the stream of each range begins.
void find_offsets(const Section& s, const Layout& l, int64_t* lengths, int64_t* offsets, Launch launch) {
  start_spread(lengths_kernel, l.ranges, launch, s, l, lengths);
  prefix_sums(lengths, offsets, l.ranges, launch);
}

// A section without room for its lengths is known here; its ranges are counted as malformed.
bool readable(const Section& s, const Layout& l, int64_t* wrong, Launch launch) {
  if (!too_short(s, l.value_bytes, l.ranges)) return true;
  start_blocks(count_kernel, 1, 1, launch, wrong, std::max<int64_t>(l.ranges, 1));
  return false;
}

}  // namespace

int64_t binary_encode(const int32_t* positions, int64_t kept, const void* mean, int value_bytes, int64_t count,
                      int parameter, uint8_t* out, Launch launch) {
  const Layout l = layout_of(value_bytes, parameter, count);
  // Behind the offsets the bytes of all streams, then how many positions are wrong: fetched together.
  const Scratch<int64_t> lengths(l.ranges + 1, launch), offsets(l.ranges + 2, launch);
  int64_t *total = offsets.get() + l.ranges, *bad = total + 1;
  clear(bad, sizeof(int64_t), launch);
  clear(lengths.get() + l.ranges, sizeof(int64_t), launch);
  start(validate_kernel, kept, launch, positions, kept, count, bad);
  start_spread(measure_kernel, l.ranges, launch, positions, kept, l, lengths.get());
  prefix_sums(lengths.get(), offsets.get(), l.ranges + 1, launch);
  int64_t found[2];
  fetch(found, static_cast<const int64_t*>(total), 2, launch);
  if (found[1] != 0) return -1;
  check(cudaMemcpyAsync(out, mean, size_t(value_bytes), cudaMemcpyDeviceToDevice, stream_of(launch)),
        "cudaMemcpyAsync");
  start_spread(encode_kernel, l.ranges, launch, positions, kept, l, lengths.get(), offsets.get(), out);
  return streams_begin(value_bytes, l.ranges) + found[0];
}

void binary_decode(const Section* sections, int64_t section_count, int64_t own, int parameter, Dtype dtype,
                   int64_t count, double scale, void* grad, void* residual, int64_t* wrong, Launch launch) {
  clear_counts(wrong, 1, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Layout l = layout_of(sizeof(W), parameter, count);
    const Scratch<int64_t> lengths(l.ranges, launch), offsets(l.ranges, launch);
    const Scratch<W> sums(count, launch);
    auto* kept = static_cast<W*>(residual);
    clear(sums.get(), count * int64_t(sizeof(W)), launch);
    for (int64_t i = 0; i < section_count; ++i) {
      if (!readable(sections[i], l, wrong, launch)) continue;
      find_offsets(sections[i], l, lengths.get(), offsets.get(), launch);
      start_spread(add_kernel<W>, l.ranges, launch, sections[i], l, offsets.get(), sums.get(), wrong);
    }
    start(settle_kernel<T>, count, launch, sums.get(), count, W(scale), static_cast<T*>(grad), kept);
    if (!kept || too_short(sections[own], l.value_bytes, l.ranges)) return;
    find_offsets(sections[own], l, lengths.get(), offsets.get(), launch);
    start_spread(subtract_kernel<W>, l.ranges, launch, sections[own], l, offsets.get(), kept);
  });
}

void binary_clear(const Section* section, int parameter, Dtype dtype, int64_t count, void* tensor, int64_t* wrong,
                  Launch launch) {
  clear_counts(wrong, 1, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Layout l = layout_of(sizeof(Work<T>), parameter, count);
    if (!readable(*section, l, wrong, launch)) return;
    const Scratch<int64_t> lengths(l.ranges, launch), offsets(l.ranges, launch);
    find_offsets(*section, l, lengths.get(), offsets.get(), launch);
    start_spread(clear_kernel<T>, l.ranges, launch, *section, l, offsets.get(), static_cast<T*>(tensor), wrong);
  });
}

}  // namespace hvc
