// The majority of many bit vectors, counted without unpacking a bit.
#include "rules/majority.h"
#include "parts.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

// A thread counts 32 lanes, half a word: an integer of a GPU's registers. The votes of several parts are under way at
// once. kPlanes hold all counts: loops over them have no branches, which would cost more than planes that stay 0.
template <int kPlanes>
__global__ void fold_kernel(PartList<uint32_t> parts, int64_t part_count, int64_t count, uint32_t* out) {
  constexpr int kVotes = 8;
  for (int64_t half = first_item(); half < 2 * words_for(count); half += item_stride()) {
    uint32_t planes[kPlanes] = {};
    for (int64_t part = 0; part < part_count; part += kVotes) {
      uint32_t votes[kVotes];
#pragma unroll
      for (int k = 0; k < kVotes; ++k) votes[k] = part + k < part_count ? parts[part + k][half] : 0;
#pragma unroll
      for (int k = 0; k < kVotes; ++k) {
        uint32_t carry = votes[k];
#pragma unroll
        for (int level = 0; level < kPlanes; ++level) {
          const uint32_t sum = planes[level] ^ carry;
          carry &= planes[level];
          planes[level] = sum;
        }
      }
    }
    uint32_t majority = ~uint32_t(0);
#pragma unroll
    for (int level = 0; level < kPlanes; ++level)
      at_least(majority_threshold(part_count) >> level & 1, planes[level], majority);
    out[half] = majority & uint32_t(valid_bits(half / 2, count) >> (half % 2 * 32));
  }
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

void majority_fold(const uint64_t* const* parts, int64_t part_count, int64_t count, uint64_t* out, Launch launch) {
  if (count == 0) return;
  const Parts<uint32_t> halves(reinterpret_cast<const uint32_t* const*>(parts), part_count, launch);
  const auto kernel = part_count < 1 << 4   ? fold_kernel<4>
                      : part_count < 1 << 8 ? fold_kernel<8>
                                            : fold_kernel<kMaxPlanes>;
  start(kernel, 2 * words_for(count), launch, halves.list(), part_count, count, reinterpret_cast<uint32_t*>(out));
}

}  // namespace hvc
