// Sections of Golomb codes: any bytes from other ranks, and what this rank writes itself.
#include "fuzz/input.h"

using namespace hvc;
using namespace hvc::fuzz;

namespace {

// The bound of ops.golomb_bound: what a caller makes room for.
int64_t most_bytes(int64_t kept, int64_t count, int parameter) {
  const int64_t ranges = ranges_for(count, parameter), touched = std::min(kept, ranges);
  const int64_t bits = kept * (1 + parameter) + std::min(2047 * touched, count >> parameter);
  return 4 + 4 * ranges + (bits + 7 * touched) / 8;
}

void written_is_read(Input& in, int parameter, int64_t count) {
  std::vector<int32_t> positions;
  for (int64_t at = in.byte(); at < count; at += 1 + (in.coin() ? in.byte() : in.below(4096)))
    positions.push_back(int32_t(at));
  const float mean = 1;
  const int64_t kept = int64_t(positions.size());
  const Bytes out(most_bytes(kept, count, parameter));
  int64_t place[2] = {};
  const BinaryEncoded encoded{positions.data(), kept, &mean, count, parameter};
  binary_encode(&encoded, 1, kFloat32, place, out.get(), out.size, kHere);
  const int64_t used = place[1];
  require(used >= 0 && used <= out.size, "a section is no longer than its bound");
  Bytes section(used), found(4 * count);
  memcpy(section.get(), out.get(), size_t(used));
  const Section one{section.get(), used};
  int64_t wrong = 0;
  const BinaryDecoded decoded{parameter, count, found.get(), nullptr};
  binary_decode(&decoded, 1, kFloat32, &one, 1, 0, 1, &wrong, kHere);
  require(wrong == 0, "what was written is not malformed");
  size_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool sent = next < positions.size() && positions[next] == i;
    require(found.as<float>()[i] == (sent ? 1.0f : 0.0f), "what was written is read");
    next += sent;
  }
}

// Both readers of a section find the same places, and call the same ranges malformed.
void clears_what_it_adds(const Section& section, int parameter, int64_t count) {
  Bytes sums(4 * count), cleared(4 * count);
  for (int64_t i = 0; i < count; ++i) cleared.as<float>()[i] = 1;
  int64_t wrong = 0, also_wrong = 0;
  const BinaryDecoded decoded{parameter, count, sums.get(), nullptr};
  binary_decode(&decoded, 1, kFloat32, &section, 1, 0, 1, &wrong, kHere);
  binary_clear(&section, parameter, kFloat32, count, cleared.get(), &also_wrong, kHere);
  require(wrong == also_wrong, "both readers find the same ranges malformed");
  if (section.bytes < 4) return;
  const float value = section_value<float>(section);
  for (int64_t i = 0; value != 0 && i < count; ++i)
    require((sums.as<float>()[i] != 0) == (cleared.as<float>()[i] == 0), "both readers find the same places");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Dtype dtype = in.dtype();
  const int parameter = int(in.coin() ? in.below(3) : in.below(kMaxParameter + 1));
  const int64_t count = in.below(in.coin() ? 4500 : 300), ranks = 1 + in.below(3), own = in.below(ranks);
  if (in.below(4) == 0) return written_is_read(in, parameter, count), 0;
  const bool keeps = in.coin();
  const Bytes grad = in.bytes(in.coin() ? width(dtype) * 8 : 0), residual(work_width(dtype) * count);
  Bytes result(width(dtype) * count);
  memcpy(result.get(), grad.get(), size_t(std::min(grad.size, result.size)));
  const std::vector<Bytes> parts = in.sections(ranks);
  const std::vector<Section> sections = as_sections(parts);
  int64_t wrong = 0;
  const BinaryDecoded decoded{parameter, count, result.get(), keeps ? residual.get() : nullptr};
  binary_decode(&decoded, 1, dtype, sections.data(), ranks, own, 1.0 / double(ranks), &wrong, kHere);
  require(wrong >= 0 && wrong <= ranks * std::max<int64_t>(1, ranges_for(count, parameter)), "ranges are counted once");
  clears_what_it_adds(sections[0], parameter, count);
  return 0;
}
