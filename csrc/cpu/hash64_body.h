// Blocks of the 64-bit hash. Compiled once per instruction set.

constexpr int kHashVectors = kHashLanes / kWordsPerVector;

// The hash of one block of `bytes` bytes, at most 16 KiB.
HVC_INLINE uint64_t hash_block(const uint8_t* data, int64_t bytes) {
  uint64_t lanes[kHashLanes];
  for (int lane = 0; lane < kHashLanes; ++lane) lanes[lane] = hash_lane_start(lane);
  Words state[kHashVectors];
  memcpy(state, lanes, sizeof state);
  int64_t at = 0;
  for (; at + int64_t(sizeof state) <= bytes; at += int64_t(sizeof state))
    for (int i = 0; i < kHashVectors; ++i) hash_absorb(state[i], load_vector<Words>(data + at + i * kWidth));
  memcpy(lanes, state, sizeof state);
  for (int lane = 0; at < bytes; at += 8, ++lane) {
    uint64_t word = 0;
    memcpy(&word, data + at, size_t(std::min<int64_t>(8, bytes - at)));
    hash_absorb(lanes[lane], word);
  }
  uint64_t hash = 0;
  for (const uint64_t lane : lanes) hash = hash_chain(hash, lane);
  return hash;
}

void hash_blocks(const uint8_t* data, int64_t bytes, uint64_t* hashes, int64_t first, int64_t last) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * kHashBlockBytes;
    hashes[block] = hash_block(data + begin, std::min(kHashBlockBytes, bytes - begin));
  }
}
