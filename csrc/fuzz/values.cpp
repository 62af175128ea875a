// Sections of positions with values: any bytes from other ranks, in all forms, and what this rank writes itself.
#include "rules/values.h"

#include "fuzz/input.h"

using namespace hvc;
using namespace hvc::fuzz;

namespace {

// The bound of ops.values_bound: what a caller makes room for.
int64_t most_bytes(ValueForm form, int64_t kept, int64_t count, int parameter) {
  const int64_t ranges = ranges_for(count, parameter), touched = std::min(kept, ranges);
  const int64_t bits = kept * (1 + parameter) + std::min(2047 * touched, count >> parameter);
  const int64_t positions = 8 * ranges + (bits + 7 * touched) / 8;
  if (form == kSigns) return positions + 4 + (kept + 7 * touched) / 8;
  if (const int bits = code_bits(form)) return positions + 4 * codebook_levels(bits) + (kept * bits + 7 * touched) / 8;
  return positions + kept * (form == kFullValues ? 4 : 2);
}

void written_is_read(Input& in, ValueForm form, int parameter, int64_t count) {
  std::vector<int32_t> positions;
  for (int64_t at = in.byte(); at < count; at += 1 + (in.coin() ? in.byte() : in.below(4096)))
    positions.push_back(int32_t(at));
  const int64_t kept = int64_t(positions.size());
  std::vector<float> values;
  for (int64_t i = 0; i < kept; ++i) values.push_back(in.coin() ? 1.0f : -1.0f);  // exact in every form
  const std::vector<float> head(kMostLevels, 1.0f);                               // a mean, or levels
  const Bytes out(most_bytes(form, kept, count, parameter));
  int64_t place[2] = {};
  const void* const all = head_bytes(form, 4) ? head.data() : nullptr;
  const ValuesEncoded encoded{positions.data(), kept, values.data(), all, form, count, parameter};
  values_encode(&encoded, 1, kFloat32, place, out.get(), out.size, kHere);
  const int64_t used = place[1];
  require(used >= 0 && used <= out.size, "a section is no longer than its bound");
  Bytes section(used), found(4 * count);
  memcpy(section.get(), out.get(), size_t(used));
  const Section one{section.get(), used};
  int64_t wrong = 0;
  const ValuesDecoded decoded{form, parameter, count, found.get(), nullptr, nullptr};
  values_decode(&decoded, 1, kFloat32, &one, 1, 0, 1, 0, false, 1, false, &wrong, kHere);
  require(wrong == 0, "what was written is not malformed");
  size_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool sent = next < positions.size() && positions[next] == i;
    require(found.as<float>()[i] == (sent ? values[next] : 0.0f), "what was written is read");
    next += sent;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Dtype dtype = in.dtype();
  const auto form = ValueForm(in.below(7));
  const int parameter = int(in.coin() ? in.below(3) : in.below(kMaxParameter + 1));
  const int64_t count = in.below(in.coin() ? 4500 : 300), ranks = 1 + in.below(3), own = in.below(ranks);
  if (in.below(4) == 0) return written_is_read(in, form, parameter, count), 0;
  const bool keeps = in.coin(), momentum = keeps && form == kFullValues && in.coin(), masking = in.coin();
  const bool by_senders = form >= kCodes2 && in.coin();
  const Bytes grad(width(dtype) * count), residual(work_width(dtype) * count), kept(work_width(dtype) * count);
  const std::vector<Bytes> parts = in.sections(ranks);
  const std::vector<Section> sections = as_sections(parts);
  int64_t wrong = 0;
  const ValuesDecoded decoded{
      form, parameter, count, grad.get(), keeps ? residual.get() : nullptr, momentum ? kept.get() : nullptr};
  values_decode(&decoded, 1, dtype, sections.data(), ranks, own, 1.0 / double(ranks), momentum ? 0.9 : 0.0, masking, 1,
                by_senders, &wrong, kHere);
  require(wrong >= 0 && wrong <= ranks * std::max<int64_t>(1, ranges_for(count, parameter)), "ranges are counted once");
  return 0;
}
