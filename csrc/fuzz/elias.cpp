// Sections of Elias codes: any bytes from other ranks, and what this rank writes itself.
#include "rules/elias.h"

#include <cmath>

#include "fuzz/input.h"

using namespace hvc;
using namespace hvc::fuzz;

namespace {

// The bound of ops.elias_bound: what a caller makes room for.
int64_t most_bytes(int64_t count, QsgdShape shape) {
  const int64_t length = blocks_in_range(shape.block) * shape.block, bits = 2 * shape.bits - 1;
  const int64_t streams = count / length * ceil_div(bits * length, 8) + ceil_div(bits * (count % length), 8);
  return 4 * elias_ranges(count, shape.block) + kNormBytes * ceil_div(count, shape.block) + streams;
}

// Decoding what was written gives whole levels of the norms, none of them above its block's norm.
void written_is_read(Input& in, QsgdShape shape, int64_t count) {
  const Bytes x = in.array<float>(count), out(most_bytes(count, shape)), found(4 * count);
  const Stream key = in.key();
  int64_t nonfinite = 0, wrong = 0, place[2] = {};
  elias_encode(x.get(), kFloat32, count, shape, 0.0, &key, 0, place, out.get(), out.size, &nonfinite, kHere);
  const int64_t used = place[1];
  require(used >= 0 && used <= out.size, "a section is no longer than its bound");
  Bytes section(used);
  memcpy(section.get(), out.get(), size_t(used));
  const Section one{section.get(), used};
  elias_decode(&one, 1, kFloat32, count, shape, 1.0 / double(levels_of(shape.bits)), found.get(), &wrong, kHere);
  require(wrong == 0, "what was written is not malformed");
  if (nonfinite > 0) return;
  const uint8_t* norms = section.get() + 4 * elias_ranges(count, shape.block);
  for (int64_t i = 0; i < count; ++i) {
    float norm;
    memcpy(&norm, norms + i / shape.block * kNormBytes, sizeof norm);
    require(std::fabs(found.as<float>()[i]) <= norm * 1.0001f, "nothing is above its block's norm");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Dtype dtype = in.dtype();
  const int64_t block = 64 * (1 + (in.coin() ? in.below(4) : in.below(kMostBlock / 64)));
  const QsgdShape shape{int(2 + in.below(7)), block, in.coin() ? kMaximum : kPower2};
  const int64_t count = in.below(in.below(4) == 0 ? 70000 : 2000), ranks = 1 + in.below(3);
  if (in.below(4) == 0) return written_is_read(in, shape, in.coin() ? count : count % 300), 0;
  const Bytes grad(width(dtype) * count);
  const std::vector<Bytes> parts = in.sections(ranks);
  const std::vector<Section> sections = as_sections(parts);
  int64_t wrong = 0;
  const double scale = 1.0 / double(ranks * levels_of(shape.bits));
  elias_decode(sections.data(), ranks, dtype, count, shape, scale, grad.get(), &wrong, kHere);
  require(wrong >= 0 && wrong <= ranks * elias_ranges(count, shape.block), "ranges are counted once");
  return 0;
}
