// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78, initial value and final xor all ones).
#pragma once
#include "rules/common.h"

namespace hvc {

constexpr uint32_t kCrcPolynomial = 0x82F63B78u;

// Eight tables: entry b of table t is the CRC register after byte b and t zero bytes.
struct CrcTables {
  uint32_t entry[8][256];
};

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kCrcPolynomial : crc >> 1;
    tables.entry[0][byte] = crc;
  }
  for (int t = 1; t < 8; ++t)
    for (int byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables.entry[t - 1][byte];
      tables.entry[t][byte] = before >> 8 ^ tables.entry[0][before & 0xff];
    }
  return tables;
}

// Product of two polynomials modulo the polynomial above, in the reflected notation of the register.
constexpr uint32_t crc_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? b >> 1 ^ kCrcPolynomial : b >> 1;
  }
  return product;
}

// Multiplying the register by this is what `bytes` zero bytes do to it.
constexpr uint32_t crc_zeros(uint64_t bytes) {
  uint32_t result = 1u << 31, power = 1u << 23;  // 1 and x^8
  for (; bytes != 0; bytes >>= 1) {
    if (bytes & 1) result = crc_multiply(result, power);
    power = crc_multiply(power, power);
  }
  return result;
}

}  // namespace hvc
