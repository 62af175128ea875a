// What both Python modules share: unwrapping integers, releasing the GIL, nothing else.
//
// `launch` is the number of threads on the CPU and the stream on CUDA. `counter`, where there is one, is the
// device memory that receives a count; 0 means that the count is returned.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <vector>

#include "kernels.h"

namespace py = pybind11;

namespace {

using Address = uintptr_t;
using KeyWords = std::array<uint32_t, 5>;

hvc::Launch launch_of(Address launch);  // each module has its own

template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }

hvc::Stream stream_of(const KeyWords& w) { return {w[0], w[1], w[2], w[3], w[4]}; }

// An optional key as the pointer that the kernels take.
struct MaybeStream {
  explicit MaybeStream(const std::optional<KeyWords>& words) : present(words.has_value()) {
    if (present) stream = stream_of(*words);
  }
  const hvc::Stream* pointer() const { return present ? &stream : nullptr; }
  bool present;
  hvc::Stream stream{};
};

void sign_pack(Address x, int dtype, int64_t count, Address bits, Address launch) {
  hvc::sign_pack(at<void>(x), hvc::Dtype(dtype), count, at<uint64_t>(bits), launch_of(launch));
}

int64_t sign_offer(Address grad, Address residual, int dtype, int64_t count, int64_t row_length,
                   const std::optional<KeyWords>& key, int64_t word_offset, Address bits, Address sums, Address counter,
                   Address launch) {
  const MaybeStream stream(key);
  int64_t nonfinite = 0;
  hvc::sign_offer(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), count, row_length, stream.pointer(),
                  word_offset, at<uint64_t>(bits), at<double>(sums), counter ? at<int64_t>(counter) : &nonfinite,
                  launch_of(launch));
  return nonfinite;
}

void sign_decode(Address bits, Address steps, int dtype, int64_t count, int64_t row_length, int feedback, double decay,
                 double scale, const std::optional<KeyWords>& key, int64_t word_offset, Address grad, Address residual,
                 Address launch) {
  const MaybeStream stream(key);
  hvc::sign_decode(at<uint64_t>(bits), at<float>(steps), hvc::Dtype(dtype), count, row_length, hvc::Feedback(feedback),
                   decay, scale, stream.pointer(), word_offset, at<void>(grad), at<void>(residual), launch_of(launch));
}

// All tensors of a bucket at once: addresses and numbers of each, in the order of the members in kernels.h.
template <size_t kMembers> using Rows = std::vector<std::array<int64_t, kMembers>>;

void sign_offer_all(const Rows<7>& rows, int dtype, int64_t ranks, const std::optional<KeyWords>& key, Address counters,
                    Address launch) {
  const MaybeStream stream(key);
  std::vector<hvc::SignOffered> tensors;
  for (const auto& [grad, residual, count, row_length, word_offset, bits, steps] : rows)
    tensors.push_back(
        {at<void>(grad), at<void>(residual), count, row_length, word_offset, at<uint64_t>(bits), at<float>(steps)});
  hvc::sign_offer_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), ranks, stream.pointer(),
                      at<int64_t>(counters), launch_of(launch));
}

void sign_decode_all(const Rows<8>& rows, int dtype, int feedback, double decay, double scale,
                     const std::optional<KeyWords>& key, Address launch) {
  const MaybeStream stream(key);
  std::vector<hvc::SignDecoded> tensors;
  for (const auto& [bits, zeros, steps, count, row_length, word_offset, grad, residual] : rows)
    tensors.push_back({at<uint64_t>(bits), at<uint64_t>(zeros), at<float>(steps), count, row_length, word_offset,
                       at<void>(grad), at<void>(residual)});
  hvc::sign_decode_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), hvc::Feedback(feedback), decay,
                       scale, stream.pointer(), launch_of(launch));
}

void sign_unpack(Address bits, Address steps, int dtype, int64_t count, int64_t row_length, double scale, Address out,
                 Address launch) {
  hvc::sign_unpack(at<uint64_t>(bits), at<float>(steps), hvc::Dtype(dtype), count, row_length, scale, at<void>(out),
                   launch_of(launch));
}

void merge_bits(Address into, Address other, int64_t words, uint64_t numerator, uint64_t denominator,
                const KeyWords& key, int64_t word_offset, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::merge_bits(at<uint64_t>(into), at<uint64_t>(other), words, numerator, denominator, &stream, word_offset,
                  launch_of(launch));
}

void bernoulli_words(Address out, int64_t words, uint64_t numerator, uint64_t denominator, const KeyWords& key,
                     int64_t word_offset, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::bernoulli_words(at<uint64_t>(out), words, numerator, denominator, &stream, word_offset, launch_of(launch));
}

// Addresses that Python passes as integers: of what is read, and of what is written.
template <class T> const T* const* addresses(const std::vector<Address>& list) {
  static_assert(sizeof(Address) == sizeof(T*), "addresses are passed as integers");
  return list.empty() ? nullptr : reinterpret_cast<const T* const*>(list.data());
}
template <class T> T* const* outputs(const std::vector<Address>& list) {
  return const_cast<T* const*>(addresses<T>(list));
}

void majority_fold(const std::vector<Address>& parts, int64_t count, Address out, Address launch) {
  hvc::majority_fold(addresses<uint64_t>(parts), int64_t(parts.size()), count, at<uint64_t>(out), launch_of(launch));
}

void shaped_merge(Address into, Address other, int64_t words, int64_t ranks, const std::vector<Address>& before,
                  const std::vector<Address>& after, Address launch) {
  hvc::shaped_merge(at<uint64_t>(into), at<uint64_t>(other), words, ranks, addresses<uint64_t>(before),
                    outputs<uint64_t>(after), launch_of(launch));
}

void shaped_fold(const std::vector<Address>& parts, int64_t words, Address out, const std::vector<Address>& before,
                 const std::vector<Address>& after, Address launch) {
  hvc::shaped_fold(addresses<uint64_t>(parts), int64_t(parts.size()), words, at<uint64_t>(out),
                   addresses<uint64_t>(before), outputs<uint64_t>(after), launch_of(launch));
}

void ternary_fold(const std::vector<Address>& parts, int64_t words, Address out, const std::vector<Address>& before,
                  const std::vector<Address>& after, Address launch) {
  hvc::ternary_fold(addresses<uint64_t>(parts), int64_t(parts.size()), words, at<uint8_t>(out),
                    addresses<uint64_t>(before), outputs<uint64_t>(after), launch_of(launch));
}

void ternary_unpack(Address packed, int64_t words, Address bits, Address zeros, Address launch) {
  hvc::ternary_unpack(at<uint8_t>(packed), words, at<uint64_t>(bits), at<uint64_t>(zeros), launch_of(launch));
}

int64_t dense_offer(Address grad, Address residual, int dtype, int64_t count, Address out, int out_dtype,
                    Address counter, Address launch) {
  int64_t nonfinite = 0;
  hvc::dense_offer(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), count, at<void>(out), hvc::Dtype(out_dtype),
                   counter ? at<int64_t>(counter) : &nonfinite, launch_of(launch));
  return nonfinite;
}

void dense_add(Address into, Address other, int dtype, int64_t count, Address launch) {
  hvc::dense_add(at<void>(into), at<void>(other), hvc::Dtype(dtype), count, launch_of(launch));
}

void dense_decode(Address payload, int payload_dtype, int64_t count, double scale, Address grad, int grad_dtype,
                  Address residual, Address launch) {
  hvc::dense_decode(at<void>(payload), hvc::Dtype(payload_dtype), count, scale, at<void>(grad), hvc::Dtype(grad_dtype),
                    at<void>(residual), launch_of(launch));
}

void dense_offer_all(const Rows<4>& rows, int dtype, int out_dtype, Address counters, Address launch) {
  std::vector<hvc::DenseOffered> tensors;
  for (const auto& [grad, residual, count, out] : rows)
    tensors.push_back({at<void>(grad), at<void>(residual), count, at<void>(out)});
  hvc::dense_offer_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), hvc::Dtype(out_dtype),
                       at<int64_t>(counters), launch_of(launch));
}

void dense_decode_all(const Rows<4>& rows, int payload_dtype, double scale, int grad_dtype, Address launch) {
  std::vector<hvc::DenseDecoded> tensors;
  for (const auto& [payload, count, grad, residual] : rows)
    tensors.push_back({at<void>(payload), count, at<void>(grad), at<void>(residual)});
  hvc::dense_decode_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(payload_dtype), scale,
                        hvc::Dtype(grad_dtype), launch_of(launch));
}

int64_t norm_offer(Address grad, int dtype, int64_t count, int64_t row_length, int power, Address norms,
                   Address counter, Address launch) {
  int64_t nonfinite = 0;
  hvc::norm_offer(at<void>(grad), hvc::Dtype(dtype), count, row_length, hvc::Power(power), at<void>(norms),
                  counter ? at<int64_t>(counter) : &nonfinite, launch_of(launch));
  return nonfinite;
}

void level_encode(Address grad, Address norms, Address bounds, int dtype, int64_t count, int64_t row_length, int bits,
                  int levels, const KeyWords& key, int64_t offset, Address codes, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::level_encode(at<void>(grad), at<void>(norms), at<void>(bounds), hvc::Dtype(dtype), count, row_length, bits,
                    levels, &stream, offset, at<void>(codes), launch_of(launch));
}

void level_add(Address into, Address other, int64_t count, int bits, Address launch) {
  hvc::level_add(at<void>(into), at<void>(other), count, bits, launch_of(launch));
}

void level_decode(Address codes, Address norms, int64_t count, int64_t row_length, int bits, double scale, Address grad,
                  int dtype, Address launch) {
  hvc::level_decode(at<void>(codes), at<void>(norms), count, row_length, bits, scale, at<void>(grad), hvc::Dtype(dtype),
                    launch_of(launch));
}

void octave_encode(Address grad, Address norms, int dtype, int64_t count, int64_t row_length, int bits, int headroom,
                   const KeyWords& key, int64_t offset, Address codes, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::octave_encode(at<void>(grad), at<void>(norms), hvc::Dtype(dtype), count, row_length, bits, headroom, &stream,
                     offset, at<uint8_t>(codes), launch_of(launch));
}

void octave_merge(Address into, Address other, int64_t bytes, int bits, const KeyWords& key, int64_t offset,
                  Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::octave_merge(at<uint8_t>(into), at<uint8_t>(other), bytes, bits, &stream, offset, launch_of(launch));
}

void octave_decode(Address codes, Address norms, int64_t count, int64_t row_length, int bits, int headroom,
                   double scale, Address grad, int dtype, Address launch) {
  hvc::octave_decode(at<uint8_t>(codes), at<void>(norms), count, row_length, bits, headroom, scale, at<void>(grad),
                     hvc::Dtype(dtype), launch_of(launch));
}

void triad(Address a, Address b, Address c, float s, int64_t count, Address launch) {
  hvc::triad(at<float>(a), at<float>(b), at<float>(c), s, count, launch_of(launch));
}

uint64_t hash64(Address data, int64_t bytes, uint64_t seed, Address launch) {
  return hvc::hash64(at<void>(data), bytes, seed, launch_of(launch));
}

#include "bind_adam.h"
#include "bind_lowrank.h"
#include "bind_points.h"
#include "bind_records.h"
#include "bind_quantise.h"
#include "bind_sketch.h"
#include "bind_sparse.h"
// These two use what the ones above define.
#include "bind_elias.h"
#include "bind_values.h"

void define_kernels(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  define_adam(module);
  define_sketch(module);
  define_lowrank(module);
  define_points(module);
  define_records(module);
  define_quantise(module);
  module.def("sign_pack", &sign_pack, unlocked());
  module.def("sign_offer", &sign_offer, unlocked());
  module.def("sign_decode", &sign_decode, unlocked());
  module.def("sign_offer_all", &sign_offer_all, unlocked());
  module.def("sign_decode_all", &sign_decode_all, unlocked());
  module.def("sign_unpack", &sign_unpack, unlocked());
  module.def("merge_bits", &merge_bits, unlocked());
  module.def("bernoulli_words", &bernoulli_words, unlocked());
  module.def("majority_fold", &majority_fold, unlocked());
  module.def("shaped_merge", &shaped_merge, unlocked());
  module.def("shaped_fold", &shaped_fold, unlocked());
  module.def("ternary_fold", &ternary_fold, unlocked());
  module.def("ternary_unpack", &ternary_unpack, unlocked());
  module.def("dense_offer", &dense_offer, unlocked());
  module.def("dense_add", &dense_add, unlocked());
  module.def("dense_decode", &dense_decode, unlocked());
  module.def("dense_offer_all", &dense_offer_all, unlocked());
  module.def("dense_decode_all", &dense_decode_all, unlocked());
  module.def("norm_offer", &norm_offer, unlocked());
  module.def("level_encode", &level_encode, unlocked());
  module.def("level_add", &level_add, unlocked());
  module.def("level_decode", &level_decode, unlocked());
  module.def("octave_encode", &octave_encode, unlocked());
  module.def("octave_merge", &octave_merge, unlocked());
  module.def("octave_decode", &octave_decode, unlocked());
  module.def("triad", &triad, unlocked());
  module.def("hash64", &hash64, unlocked());
  define_sparse_kernels(module);
  define_elias(module);
  define_values(module);
}

}  // namespace
