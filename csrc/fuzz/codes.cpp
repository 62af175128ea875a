// Codes of a fixed number of bits, with norms: any codes and any norms, NaN and infinity among them.
#include "rules/qsgd.h"

#include "fuzz/input.h"

using namespace hvc;
using namespace hvc::fuzz;

namespace {

int64_t code_bytes(int bits, int64_t count) { return packed_bytes(count, bits); }

void uniform(Input& in, Dtype dtype, int64_t count) {
  const int bits = 4 << in.below(3);
  const int64_t row = 2 * (1 + in.below(300));
  const Bytes norms = in.bytes(work_width(dtype) * ceil_div(count, row)), grad(width(dtype) * count);
  const Bytes into = in.bytes(code_bytes(bits, count)), other = in.bytes(into.size);
  uniform_add(into.get(), other.get(), bits == 16 ? count : into.size, bits, kHere);
  const UniformDecoded tensor{into.get(), norms.get(), count, row, grad.get()};
  uniform_decode(&tensor, 1, dtype, bits, 1.0 / 3, kHere);
  // What is encoded is this rank's own, but its norms come from other ranks.
  const Bytes x = in.bytes(width(dtype) * count);
  const Stream key = in.key();
  const UniformEncoded encoded{x.get(), norms.get(), count, row, 0, into.get(), nullptr};
  uniform_encode(&encoded, 1, dtype, bits, int32_t(1 + in.below((1 << (bits - 1)) - 1)), &key, kHere);
}

void packed(Input& in, Dtype dtype, int64_t count) {
  const int bits = int(2 + in.below(7)), sum_bits = int(2 + in.below(7));
  const int64_t row = 8 * (1 + in.below(100)), ranks = 1 + in.below(4);
  const Bytes norms = in.bytes(work_width(dtype) * ceil_div(count, row)), grad(width(dtype) * count);
  const std::vector<Bytes> parts = in.parts(ranks, code_bytes(bits, count));
  const Bytes sums(code_bytes(sum_bits, count));
  uniform_fold(pointers<const uint8_t>(parts).data(), ranks, count, bits, sum_bits, sums.get(), kHere);
  const UniformDecoded tensor{sums.get(), norms.get(), count, row, grad.get()};
  uniform_decode(&tensor, 1, dtype, sum_bits, 1.0 / 3, kHere);
}

void exponential(Input& in, Dtype dtype, int64_t count) {
  const int bits = in.coin() ? 4 : 8, headroom = int(1 + in.below(bits == 4 ? 7 : 31));
  const int mantissa = bits == 8 && in.coin() ? 2 : 0;
  const int64_t row = 2 * (1 + in.below(300)), ranks = 1 + in.below(4);
  const Stream key = in.key();
  const Bytes norms = in.bytes(work_width(dtype) * ceil_div(count, row)), grad(width(dtype) * count);
  const std::vector<Bytes> parts = in.parts(ranks, code_bytes(bits, count));
  const Bytes into = in.bytes(code_bytes(bits, count));
  exponential_merge(into.get(), parts[0].get(), into.size, bits, &key, 0, kHere);
  if (bits == 8)
    exponential_fold(pointers<const uint8_t>(parts).data(), ranks, count, headroom, mantissa, &key, 0, into.get(),
                     kHere);
  const ExponentialDecoded tensor{into.get(), norms.get(), count, row, grad.get()};
  exponential_decode(&tensor, 1, dtype, bits, headroom, mantissa, 1.0 / double(ranks), kHere);
  const Bytes x = in.bytes(width(dtype) * count);
  const ExponentialEncoded encoded{x.get(), norms.get(), count, row, 0, into.get()};
  exponential_encode(&encoded, 1, dtype, bits, headroom, mantissa, &key, kHere);
}

void qsgd(Input& in, Dtype dtype, int64_t count) {
  const QsgdShape shape{int(2 + in.below(7)), 64 * (1 + in.below(6)), in.coin() ? kMaximum : kPower2};
  const int64_t ranks = 1 + in.below(4), blocks = ceil_div(count, shape.block);
  const Stream key = in.key();
  const std::vector<Bytes> parts = in.parts(ranks, blocks * record_bytes(shape.block, shape.bits));
  const Bytes grad(width(dtype) * count);
  qsgd_fold(pointers<const uint8_t>(parts).data(), ranks, blocks, shape, &key, 0, parts[0].get(), kHere);
  const QsgdDecoded tensor{parts[0].get(), count, grad.get()};
  qsgd_decode(&tensor, 1, dtype, shape, 1.0 / double(levels_of(shape.bits)), kHere);
  const int kept_bits = int(2 + in.below(7));
  const int64_t of_kept = blocks * record_bytes(shape.block, kept_bits);
  const Bytes kept = in.bytes(of_kept), left(of_kept);
  loco_fold(pointers<const uint8_t>(parts).data(), ranks, blocks, shape, kept_bits, 0.8, kept.get(), parts[0].get(),
            left.get(), kHere);
  const LocoEncoded encoded{grad.get(), kept.get(), count, parts[0].get(), left.get()};
  int64_t nonfinite = 0;
  loco_encode(&encoded, 1, dtype, shape, kept_bits, 0.8, &nonfinite, kHere);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int64_t method = in.below(4);
  const Dtype dtype = in.dtype();
  const int64_t count = in.below(2500);
  const auto run = method == 0 ? uniform : method == 1 ? exponential : method == 2 ? qsgd : packed;
  run(in, dtype, count);
  return 0;
}
