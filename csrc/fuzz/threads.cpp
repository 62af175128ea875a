// What shares a loop among threads, for the thread sanitizer: each kernel with one thread and with four, twice at the
// same time, and all of them must write the same bytes.
#include <cstdio>
#include <thread>
#include <vector>

#include "fuzz/input.h"
#include "rules/elias.h"
#include "rules/record.h"
#include "rules/values.h"

using namespace hvc;
using namespace hvc::fuzz;

namespace {

constexpr int64_t kCount = 1 << 20, kRow = 4096, kRows = kCount / kRow, kBlock = 1024;
constexpr Stream kKey{1, 2, 3 << 8, 4, 5};

Bytes numbers(uint32_t seed) {
  Bytes made(4 * kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    seed = seed * 1664525u + 1013904223u;
    made.as<float>()[i] = float(int32_t(seed)) / float(1 << 30);
  }
  return made;
}

// All that a kernel wrote, one after the other.
struct Written {
  std::vector<Bytes> arrays;
  int64_t counted = 0;
};
using Kernel = Written (*)(Launch);

Written signs(Launch launch) {
  const Bytes grad = numbers(1), residual = numbers(2), bits(8 * words_for(kCount)), sums(8 * kRows);
  const Bytes steps(4 * kRows), result(4 * kCount);
  Written w;
  const SignOffered offered{grad.get(), residual.get(),      nullptr,           kCount, kRow,
                            0,          bits.as<uint64_t>(), steps.as<float>(), nullptr};
  sign_offer(&offered, 1, kFloat32, kFloat32, 2, 0.5f, &kKey, &w.counted, launch);
  const SignDecoded decoded{bits.as<uint64_t>(), nullptr,       steps.as<float>(), nullptr, kCount, kRow, 0,
                            grad.get(),          residual.get()};
  sign_decode(&decoded, 1, kFloat32, kFloat32, kFeedbackOwn, 1, 0.5, &kKey, nullptr, launch);
  for (const Bytes* array : {&grad, &residual, &bits, &steps}) w.arrays.push_back(copy_of(*array));
  return w;
}

Written two_values(Launch launch) {
  const Bytes grad = numbers(3), residual = numbers(4), bits(8 * words_for(kCount)), highs(8 * kRows);
  const Bytes lows(8 * kRows), ones(8 * kRows), steps = numbers(5);
  Written w;
  const TwoValueOffered offered{
      grad.get(),        residual.get(),    kCount, kRow, bits.as<uint64_t>(), highs.as<double>(),
      lows.as<double>(), ones.as<int64_t>()};
  two_value_offer(&offered, 1, kFloat32, kFloat32, &w.counted, launch);
  const uint64_t* bits_at[] = {bits.as<uint64_t>()};
  const float* steps_at[] = {steps.as<float>()};
  const TwoValueDecoded decoded{kCount, kRow, 0, 0, grad.get(), residual.get()};
  two_value_decode(&decoded, 1, kFloat32, kFloat32, bits_at, steps_at, nullptr, 1, 0, 1, nullptr, launch);
  for (const Bytes* array : {&grad, &residual, &bits, &highs, &lows, &ones}) w.arrays.push_back(copy_of(*array));
  return w;
}

Written sparse(Launch launch) {
  const Bytes grad = numbers(6), residual = numbers(7), positions(4 * (kCount / 50)), values(4 * (kCount / 50));
  const Bytes out(kCount);
  Written w;
  const int64_t k = kCount / 50;
  int64_t found[kSelected], place[2] = {};
  const TopSelected top{grad.get(), residual.get(), kCount, k, positions.as<int32_t>(), values.get(), found};
  top_select(&top, 1, kFloat32, false, launch);
  const ValuesEncoded written{positions.as<int32_t>(), found[0], values.get(), nullptr, kFullValues, kCount, 5};
  values_encode(&written, 1, kFloat32, place, out.get(), out.size, launch);
  const Section section{out.get(), place[1]};
  int64_t wrong = 0;
  const ValuesDecoded read{kFullValues, 5, kCount, grad.get(), residual.get(), nullptr};
  values_decode(&read, 1, kFloat32, &section, 1, 0, 1, 0, false, 1, false, &wrong, launch);
  const ChunkSelected of_chunks{grad.get(), residual.get(), kCount, 20, positions.as<int32_t>(), values.get(), found};
  chunk_select(&of_chunks, 1, kFloat32, 1024, 20, launch);
  float mean = 0;
  int64_t binary[kSelected], other_place[2] = {};
  const BinarySelected of_sides{grad.get(), residual.get(), kCount, k, positions.as<int32_t>(), &mean, binary};
  binary_select(&of_sides, 1, kFloat32, false, launch);
  const BinaryEncoded coded{positions.as<int32_t>(), binary[0], &mean, kCount, 5};
  binary_encode(&coded, 1, kFloat32, other_place, out.get(), out.size, launch);
  const Section other{out.get(), other_place[1]};
  int64_t also_wrong = 0;
  const BinaryDecoded decoded{5, kCount, grad.get(), residual.get()};
  binary_decode(&decoded, 1, kFloat32, &other, 1, 0, 1, &also_wrong, launch);
  w.counted = found[0] + place[1] + binary[0] + other_place[1] + wrong + also_wrong;
  for (const Bytes* array : {&grad, &residual, &out}) w.arrays.push_back(copy_of(*array));
  return w;
}

Written quantised(Launch launch) {
  const Bytes grad = numbers(8), out(2 * kCount), norms(4 * kRows), codes(kCount);
  const QsgdShape shape{4, kBlock, kMaximum};
  Written w;
  const NormOffered norm{grad.get(), kCount, kRow, norms.get()};
  norm_offer(&norm, 1, kFloat32, kMaximum, &w.counted, launch);
  const UniformEncoded uniform{grad.get(), norms.get(), kCount, kRow, 0, codes.get(), nullptr};
  uniform_encode(&uniform, 1, kFloat32, 8, 100, &kKey, launch);
  const UniformDecoded back{codes.get(), norms.get(), kCount, kRow, grad.get()};
  uniform_decode(&back, 1, kFloat32, 8, 0.01, launch);
  int64_t wrong = 0;
  int64_t place[2] = {};
  elias_encode(grad.get(), kFloat32, kCount, shape, 0, &kKey, 0, place, out.get(), out.size, &w.counted, launch);
  const Section section{out.get(), place[1]};
  elias_decode(&section, 1, kFloat32, kCount, shape, 1, grad.get(), &wrong, launch);
  const QsgdEncoded encoded{grad.get(), kCount, 0, out.get()};
  qsgd_encode(&encoded, 1, kFloat32, shape, &kKey, &w.counted, launch);
  const QsgdDecoded decoded{out.get(), kCount, grad.get()};
  qsgd_decode(&decoded, 1, kFloat32, shape, 1, launch);
  const ExponentialEncoded exponential{grad.get(), norms.get(), kCount, kRow, 0, codes.as<uint8_t>()};
  exponential_encode(&exponential, 1, kFloat32, 8, 3, 0, &kKey, launch);
  w.counted += place[1] + wrong;
  for (const Bytes* array : {&grad, &out, &norms, &codes}) w.arrays.push_back(copy_of(*array));
  return w;
}

Written sketches(Launch launch) {
  constexpr int64_t kPlaces = 4099, kTop = 1000;
  const Bytes grad = numbers(9), residual = numbers(10), table(4 * 3 * 16 * kPlaces), positions(8 * kTop);
  const Bytes estimates(4 * kTop), sums(8 * 256);
  Written w;
  sketch_encode(grad.get(), residual.get(), nullptr, 0, kFloat32, kCount, 0, 3, kPlaces, &kKey, table.get(), &w.counted,
                launch);
  const Span span{0, kCount};
  w.counted += sketch_top(table.get(), kFloat32, 3, kPlaces, &kKey, &span, 1, kTop, positions.as<int64_t>(),
                          estimates.get(), launch);
  const NormSketched norm{grad.get(), kCount, 0, sums.as<double>()};
  norm_sketch(&norm, 1, kFloat32, 16, &kKey, launch);
  for (const Bytes* array : {&table, &positions, &estimates, &sums}) w.arrays.push_back(copy_of(*array));
  return w;
}

Written unions(Launch launch) {
  const Bytes grad = numbers(20), bits(words_for(kCount) * 8), values(4 * kCount), result(4 * kCount);
  Written w;
  int64_t kept = 0;
  for (int64_t i = 0; i < kCount; ++i)
    if (grad.as<float>()[i] < 1) grad.as<float>()[i] = 0;
  const UnionMarked marked{grad.get(), kCount, bits.as<uint64_t>()};
  union_mark(&marked, 1, kFloat32, 1, &w.counted, launch);
  const UnionCounted counted{bits.as<uint64_t>(), kCount};
  union_count(&counted, 1, 1, &kept, launch);
  const UnionEncoded encoded{grad.get(), bits.as<uint64_t>(), kCount, kept, values.get()};
  union_encode(&encoded, 1, kFloat32, 1, launch);
  const UnionDecoded decoded{values.get(), bits.as<uint64_t>(), kCount, kept, result.get()};
  union_decode(&decoded, 1, kFloat32, 1, 0.5, launch);
  w.counted += kept;
  for (const Bytes* array : {&bits, &values, &result}) w.arrays.push_back(copy_of(*array));
  return w;
}

Written matrices(Launch launch) {
  constexpr int64_t kRank = 3, kLines = kRows, kColumns = kRow;
  const Bytes grad = numbers(11), residual = numbers(12), left(4 * kLines * kRank), right(4 * kColumns * kRank);
  Written w;
  const Bytes start = numbers(13);
  lowrank_start(start.get(), kFloat32, kColumns, kRank, &kKey, 0, right.get(), launch);
  lowrank_left(grad.get(), residual.get(), kFloat32, kLines, kColumns, kRank, right.get(), left.get(), &w.counted,
               launch);
  lowrank_orthonormalise(left.get(), kFloat32, kLines, kRank, launch);
  lowrank_right(grad.get(), residual.get(), kFloat32, kLines, kColumns, kRank, left.get(), right.get(), launch);
  lowrank_decode(left.get(), right.get(), kFloat32, kLines, kColumns, kRank, 1, grad.get(), residual.get(), launch);
  for (const Bytes* array : {&grad, &residual, &left, &right}) w.arrays.push_back(copy_of(*array));
  return w;
}

Written others(Launch launch) {
  const Bytes grad = numbers(14), residual = numbers(15), records(kCount), left(4 * kCount), kept = numbers(16);
  const Bytes scales = numbers(17), bits = numbers(18), words = numbers(19), values(4 * kCount);
  Written w;
  record_offer(grad.get(), residual.get(), kFloat32, kCount, kBlock, kMean, records.get(), &w.counted, launch);
  const uint8_t* parts[] = {records.get()};
  record_fold(parts, 1, kFloat32, kCount, kBlock, kMean, kept.get(), left.get(), records.get(), launch);
  record_decode(records.get(), scales.as<float>(), kFloat32, kCount, kBlock, 1, grad.get(), residual.get(), launch);
  merge_bits(bits.as<uint64_t>(), words.as<uint64_t>(), kCount / 2, 1, 3, &kKey, 0, launch);
  sample_offer(grad.get(), residual.get(), kFloat32, kCount, 1, kCount / 8, &kKey, 0, values.get(), &w.counted, launch);
  sample_decode(values.get(), kFloat32, kCount, 1, kCount / 8, &kKey, 0, 1, true, grad.get(), residual.get(), launch);
  dense_add(grad.get(), residual.get(), kFloat32, kCount, launch);
  absorb(grad.get(), residual.get(), left.get(), 0.9, kFloat32, kCount, launch);
  w.counted += int64_t(hash64(grad.get(), grad.size, 1, launch) >> 1);
  for (const Bytes* array : {&grad, &residual, &records, &left, &bits, &values}) w.arrays.push_back(copy_of(*array));
  return w;
}

void compare(const char* name, const Written& one, const Written& other) {
  require(one.counted == other.counted && one.arrays.size() == other.arrays.size(), name);
  for (size_t i = 0; i < one.arrays.size(); ++i) require(one.arrays[i] == other.arrays[i], name);
}

}  // namespace

int main() {
  const std::pair<const char*, Kernel> kernels[] = {
      {"signs", signs},       {"two values", two_values}, {"sparse", sparse},     {"quantised", quantised},
      {"sketches", sketches}, {"unions", unions},         {"matrices", matrices}, {"others", others},
  };
  for (const auto& [name, kernel] : kernels) {
    const Written alone = kernel({1, nullptr});
    Written first, second;
    // As two compressions in one process: nothing may be shared that is written.
    std::thread beside([&first, run = kernel] { first = run({4, nullptr}); });
    second = kernel({4, nullptr});
    beside.join();
    compare(name, alone, first);
    compare(name, alone, second);
    printf("%s: the same with one thread and with four, twice at a time\n", name);
  }
  return 0;
}
