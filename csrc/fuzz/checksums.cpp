// Checksums: the same for any cut of the bytes, equal to the sum taken bit by bit, and the copy is a copy.
#include "fuzz/input.h"

using namespace hvc;
using namespace hvc::fuzz;

namespace {

// CRC-32C by its definition.
uint32_t bit_by_bit(const uint8_t* data, int64_t bytes) {
  uint32_t crc = ~0u;
  for (int64_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (0x82f63b78u & (0u - (crc & 1u)));
  }
  return ~crc;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int64_t shift = in.below(16), wanted = in.below(1 << 16);
  const Bytes bytes = in.bytes(shift + (in.coin() ? wanted : in.left()));
  const uint8_t* from = bytes.get() + shift;
  const int64_t count = bytes.size - shift, cut = in.below(count + 1);
  const uint32_t due = bit_by_bit(from, count);
  require(crc32c(from, count, 0) == due, "the checksum is that of its definition");
  require(crc32c(from + cut, count - cut, crc32c(from, cut, 0)) == due, "a checksum can be taken in parts");
  const Bytes copy(count);
  require(crc32c_copy(copy.get(), from, count, 0) == due, "copying gives the same checksum");
  require(memcmp(copy.get(), from, size_t(count)) == 0, "the copy is a copy");
  if (count == 0) return 0;
  const uint64_t hash = hash64(copy.get(), count, 1, kHere);
  copy.get()[cut % count] ^= uint8_t(1 << cut % 8);
  require(hash64(copy.get(), count, 1, kHere) != hash, "a flipped bit changes the hash");
  require(crc32c(copy.get(), count, 0) != due, "a flipped bit changes the checksum");
  return 0;
}
