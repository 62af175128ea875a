// One bit or three values for an element: any bits, any scales, and any counts that merging has kept.
#include "rules/record.h"
#include "rules/ternary.h"

#include "fuzz/input.h"

using namespace hvc;
using namespace hvc::fuzz;

namespace {

void sign(Input& in, Dtype dtype, int64_t count) {
  const int64_t row = 1 + in.below(700);
  const auto feedback = Feedback(in.below(4));
  const bool has_zeros = in.coin();
  const Stream key = in.key();
  const Bytes bits = in.array<uint64_t>(words_for(count)), zeros = in.array<uint64_t>(words_for(count));
  const Bytes steps = in.array<float>(ceil_div(count, row)), grad = in.bytes(width(dtype) * count);
  const Dtype kept_dtype = in.coin() ? kBFloat16 : work_type(dtype);
  const Bytes residual(width(kept_dtype) * count);
  const SignDecoded tensor{bits.as<uint64_t>(),
                           has_zeros ? zeros.as<uint64_t>() : nullptr,
                           steps.as<float>(),
                           nullptr,
                           count,
                           row,
                           0,
                           grad.get(),
                           feedback == kFeedbackNone ? nullptr : residual.get()};
  sign_decode(&tensor, 1, dtype, kept_dtype, feedback, 1, 0.5, &key, &key, kHere);
}

void two_values(Input& in, Dtype dtype, int64_t count) {
  const int64_t row = 1 + in.below(700), ranks = 1 + in.below(4), rows = ceil_div(count, row);
  const bool two = in.coin();
  const std::vector<Bytes> bits = in.parts(ranks, 8 * words_for(count)), highs = in.parts(ranks, 4 * rows);
  const std::vector<Bytes> lows = in.parts(ranks, 4 * rows);
  const Bytes grad = in.bytes(width(dtype) * count);
  const Dtype kept_dtype = in.coin() ? kBFloat16 : work_type(dtype);
  const Bytes residual(width(kept_dtype) * count);
  const TwoValueDecoded tensor{count, row, 0, 0, grad.get(), residual.get()};
  const auto lows_at = pointers<const float>(lows);
  const Stream key = in.key();
  two_value_decode(&tensor, 1, dtype, kept_dtype, pointers<const uint64_t>(bits).data(),
                   pointers<const float>(highs).data(), two ? lows_at.data() : nullptr, ranks, in.below(ranks),
                   1.0 / double(ranks), &key, kHere);
}

void merging(Input& in, int64_t count) {
  const int64_t words = words_for(count), ranks = 2 + in.below(9), rows = count_rows(ranks);
  const Stream key = in.key();
  const std::vector<Bytes> parts = in.parts(ranks, 8 * words), before = in.parts(rows, 8 * words);
  const auto parts_at = pointers<const uint64_t>(parts), before_at = pointers<const uint64_t>(before);
  const std::vector<Bytes> after = Input(nullptr, 0).parts(rows, 8 * words);
  const Bytes out(8 * words);
  const auto after_at = pointers<uint64_t>(after);
  merge_bits(parts[0].as<uint64_t>(), parts_at[1], words, uint64_t(in.byte()), 255, &key, 0, kHere);
  majority_fold(parts_at.data(), ranks, count, out.as<uint64_t>(), kHere);
  shaped_fold(parts_at.data(), ranks, words, out.as<uint64_t>(), before_at.data(), after_at.data(), kHere);
  shaped_merge(out.as<uint64_t>(), parts_at[1], words, ranks, before_at.data(), after_at.data(), kHere);
}

// What any bytes unpack to is one of three values, and whole groups that were packed come out as they went in.
void ternary(Input& in, int64_t count) {
  const int64_t groups = 1 + count / 320, words = groups * kGroupWords, ranks = 2 + in.below(9);
  const int64_t rows = count_rows(ternary_states(ranks));
  const Bytes packed = in.bytes(groups * kGroupBytes), bits(8 * words), zeros(8 * words);
  ternary_unpack(packed.get(), words, bits.as<uint64_t>(), zeros.as<uint64_t>(), kHere);
  for (int64_t word = 0; word < words; ++word)
    require((zeros.as<uint64_t>()[word] & ~bits.as<uint64_t>()[word]) == 0, "a zero has its bit set");
  const std::vector<Bytes> parts = in.parts(ranks, 8 * words), kept = in.parts(rows, 8 * words);
  const auto kept_at = pointers<uint64_t>(kept);
  ternary_fold(pointers<const uint64_t>(parts).data(), ranks, words, packed.get(),
               pointers<const uint64_t>(kept).data(), kept_at.data(), kHere);
  for (int64_t i = 0; i < packed.size; ++i) require(packed.get()[i] < 243, "five values are below 3^5");
}

void records(Input& in, Dtype dtype, int64_t count) {
  const int64_t block = 64 * (1 + in.below(6)), ranks = 1 + in.below(4), blocks = ceil_div(count, block);
  const auto rule = in.coin() ? kMean : kRoot;
  const auto fold_rule = in.coin() ? kShared : rule;
  const std::vector<Bytes> parts = in.parts(ranks, blocks * record_bytes(block));
  const Bytes kept = in.bytes(work_width(dtype) * count), left(kept.size), scales = in.array<float>(blocks);
  const Bytes grad = in.bytes(width(dtype) * count), residual(work_width(dtype) * count);
  record_fold(pointers<const uint8_t>(parts).data(), ranks, dtype, count, block, fold_rule, kept.get(), left.get(),
              parts[0].get(), kHere);
  record_decode(parts[0].get(), scales.as<float>(), dtype, count, block, 0.25, grad.get(), residual.get(), kHere);
  int64_t nonfinite = 0;
  record_offer(grad.get(), residual.get(), dtype, count, block, rule, parts[0].get(), &nonfinite, kHere);
  require(nonfinite >= 0 && nonfinite <= count, "what is not finite is counted once");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int64_t method = in.below(5);
  const Dtype dtype = in.dtype();
  const int64_t count = in.below(2500);
  if (method == 0) sign(in, dtype, count);
  if (method == 1) two_values(in, dtype, count);
  if (method == 2) merging(in, count);
  if (method == 3) ternary(in, count);
  if (method == 4) records(in, dtype, count);
  return 0;
}
