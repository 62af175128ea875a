// The 64-bit hash: blocks in any order, their hashes chained in index order.
#include "rules/hash64.h"

#include <memory>

#include "kernels.h"
#include "parallel.h"

#define HVC_BODY "hash64_body.h"
#include "foreach_isa.h"

namespace hvc {

uint64_t hash64(const void* data, int64_t bytes, uint64_t seed, Launch launch) {
  const int64_t blocks = ceil_div(bytes, kHashBlockBytes);
  const std::unique_ptr<uint64_t[]> hashes(new uint64_t[size_t(blocks)]);
  const auto range = HVC_CHOOSE(hash_blocks);
  parallel_for(launch.threads, blocks, bytes, [&](int64_t first, int64_t last) {
    range(static_cast<const uint8_t*>(data), bytes, hashes.get(), first, last);
  });
  uint64_t hash = hash_mix(seed);
  for (int64_t block = 0; block < blocks; ++block) hash = hash_chain(hash, hashes[block]);
  return hash_chain(hash, uint64_t(bytes));
}

}  // namespace hvc
