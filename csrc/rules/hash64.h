// A 64-bit hash for telling whether two ranks hold the same bytes. Not for adversaries.
//
// The bytes are little-endian 64-bit words, the last one padded with zeros. A block is 2048 words; word i of a
// block goes to lane i mod 32. Blocks are independent of each other (threads, warps), lanes too (vectors).
// Every step below is a bijection of the state for a fixed word, and of the word for a fixed state. So if two
// inputs of equal length differ in one word only, their hashes differ: not probably, always.
#pragma once
#include "rules/common.h"

namespace hvc {

constexpr int kHashLanes = 32;
constexpr int64_t kHashBlockWords = 2048;
constexpr int64_t kHashBlockBytes = 8 * kHashBlockWords;
constexpr uint64_t kHashLaneSeed = 0x9E3779B97F4A7C15u;

HVC_RULE uint64_t hash_lane_start(int lane) { return kHashLaneSeed * uint64_t(lane + 1); }

// Shifts and adds only: as fast in vectors without a 64-bit multiplier. Bits is a word or a vector of words.
template <class Bits> HVC_RULE void hash_absorb(Bits& state, const Bits& word) {
  state ^= word;
  state += state << 23;
  state ^= state >> 31;
}

// The finaliser of MurmurHash3.
HVC_RULE uint64_t hash_mix(uint64_t h) {
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdu;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53u;
  return h ^ (h >> 33);
}

// Lanes of a block, then blocks, are chained in index order; the length in bytes comes last.
HVC_RULE uint64_t hash_chain(uint64_t h, uint64_t next) { return hash_mix(h ^ next); }

}  // namespace hvc
