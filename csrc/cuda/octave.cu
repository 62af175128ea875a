// Exponential dithering: signs and exponents that merge in a tree.
#include "hvc/octave.h"

#include "dither.h"
#include "parts.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct OctaveEncode {
  const T* grad;
  const Work<T>* norms;
  int64_t count, row_length;
  int bits;
  Octaves octaves;
  Stream key;
  int64_t offset;
  uint8_t* codes;
};

template <class T> struct OctaveDecode {
  const uint8_t* codes;
  const Work<T>* norms;
  int64_t count, row_length;
  int bits;
  int32_t headroom;
  double scale;
  T* grad;
};

struct OctaveMerge {
  uint8_t* into;
  const uint8_t* other;
  int64_t count;
  int bits;
  Stream key;
  int64_t offset;
};

struct OctaveFold {
  PartList<uint8_t> parts;
  int64_t part_count, count;
  Octaves octaves;
  Stream key;
  int64_t offset;
  uint8_t* out;
};

__device__ inline uint32_t code_at(const uint8_t* codes, int64_t i, int bits) {
  return bits == 4 ? nibble(codes, i) : codes[i];
}
__device__ inline void put_code(uint8_t* codes, int64_t i, int bits, uint32_t code) {
  if (bits == 4)
    put_nibble(codes, i, code);
  else
    codes[i] = uint8_t(code);
}

// ---- kernels ----------------------------------------------------------------------------------------------

template <class T> __global__ void encode_kernel(OctaveEncode<T> e) {
  each_drawn(e.key, e.offset, e.count, [&](int64_t i, uint32_t random) {
    const Scaling<Work<T>> scaling = scaling_for(e.norms[i / e.row_length], Work<T>(1));
    const float z = scaled(Work<T>(to_work(e.grad[i])), scaling);
    put_code(e.codes, i, e.bits, octave_of(z, e.octaves, 1u << (e.bits - 1), random));
  });
}

__global__ void merge_kernel(OctaveMerge m) {
  each_drawn(m.key, m.offset, m.count, [&](int64_t i, uint32_t random) {
    const uint32_t a = code_at(m.into, i, m.bits), b = code_at(m.other, i, m.bits);
    const uint32_t sign_bit = 1u << (m.bits - 1);
    const OctavePair<uint32_t> pair = octave_pair(a, b, sign_bit);
    put_code(m.into, i, m.bits, octave_merge(a, b, pair, 1u << pair.trials, random, sign_bit));
  });
}

// Codes of 8 bits: the numbers of all parts are added in their order, and the mean is rounded again.
__global__ void fold_kernel(OctaveFold f) {
  const float share = 1.0f / float(f.part_count);
  each_drawn(f.key, f.offset, f.count, [&](int64_t i, uint32_t random) {
    float sum = octave_value(f.parts[0][i], 0x80, f.octaves.headroom);
    for (int64_t part = 1; part < f.part_count; ++part)
      sum += octave_value(f.parts[part][i], 0x80, f.octaves.headroom);
    f.out[i] = uint8_t(octave_of(sum * share, f.octaves, 0x80, random));
  });
}

template <class T> __global__ void decode_kernel(OctaveDecode<T> d) {
  using W = Work<T>;
  for (int64_t i = first_item(); i < d.count; i += item_stride()) {
    const float factor = octave_value(code_at(d.codes, i, d.bits), 1u << (d.bits - 1), d.headroom);
    d.grad[i] = from_work<T>((W(factor) * W(d.scale)) * d.norms[i / d.row_length]);
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void octave_encode(const void* grad, const void* norms, Dtype dtype, int64_t count, int64_t row_length, int bits,
                   int32_t headroom, const Stream* key, int64_t offset, uint8_t* codes, Launch launch) {
  const Groups groups = groups_of(offset, count);
  if (count == 0) return;
  if (bits == 4) clear(codes, (count + 1) / 2, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const OctaveEncode<T> e{static_cast<const T*>(grad), static_cast<const Work<T>*>(norms), count, row_length, bits,
                            octaves_of(bits, headroom), *key, offset, codes};
    start(encode_kernel<T>, groups.last - groups.first, launch, e);
  });
}

void octave_merge(uint8_t* into, const uint8_t* other, int64_t bytes, int bits, const Stream* key, int64_t offset,
                  Launch launch) {
  const int64_t count = bytes * 8 / bits;
  const Groups groups = groups_of(offset, count);
  if (count == 0) return;
  start(merge_kernel, groups.last - groups.first, launch, OctaveMerge{into, other, count, bits, *key, offset});
}

void octave_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int32_t headroom, const Stream* key,
                 int64_t offset, uint8_t* out, Launch launch) {
  const Groups groups = groups_of(offset, count);
  if (count == 0) return;
  const Parts<uint8_t> listed(parts, part_count, launch);
  const OctaveFold f{listed.list(), part_count, count, octaves_of(8, headroom), *key, offset, out};
  start(fold_kernel, groups.last - groups.first, launch, f);
}

void octave_decode(const uint8_t* codes, const void* norms, int64_t count, int64_t row_length, int bits,
                   int32_t headroom, double scale, void* grad, Dtype dtype, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const OctaveDecode<T> d{codes, static_cast<const Work<T>*>(norms), count, row_length, bits, headroom, scale,
                            static_cast<T*>(grad)};
    start(decode_kernel<T>, count, launch, d);
  });
}

}  // namespace hvc
