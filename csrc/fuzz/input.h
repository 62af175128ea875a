// What a target makes of the fuzzer's bytes: choices and lengths from the front, arrays from what follows.
//
// Every array is a block of memory of exactly its size, so that the address sanitizer sees each byte read or written
// beyond it. Where the bytes are used up, zeros follow.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"

namespace hvc::fuzz {

struct Bytes {
  explicit Bytes(int64_t count) : data(new uint8_t[size_t(count)]()), size(count) {}
  template <class T> T* as() const { return reinterpret_cast<T*>(data.get()); }
  uint8_t* get() const { return data.get(); }
  bool operator==(const Bytes& other) const {
    return size == other.size && memcmp(get(), other.get(), size_t(size)) == 0;
  }
  std::unique_ptr<uint8_t[]> data;
  int64_t size;
};

inline Bytes copy_of(const Bytes& from) {
  Bytes copy(from.size);
  memcpy(copy.get(), from.get(), size_t(from.size));
  return copy;
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), left_(int64_t(size)) {}

  uint8_t byte() { return left_ > 0 ? (--left_, *at_++) : 0; }
  bool coin() { return (byte() & 1) != 0; }

  // A number in [0, bound), of as many bytes as the bound needs.
  int64_t below(int64_t bound) {
    uint64_t value = 0;
    for (int64_t rest = bound - 1; rest > 0; rest >>= 8) value = value << 8 | byte();
    return bound > 0 ? int64_t(value % uint64_t(bound)) : 0;
  }

  Bytes bytes(int64_t count) {
    Bytes made(count);
    const int64_t given = count < left_ ? count : left_;
    if (given > 0) memcpy(made.get(), at_, size_t(given));
    at_ += given, left_ -= given;
    return made;
  }
  template <class T> Bytes array(int64_t count) { return bytes(count * int64_t(sizeof(T))); }

  // Payloads of `ranks` ranks, that are as long as they should be.
  std::vector<Bytes> parts(int64_t ranks, int64_t size) {
    std::vector<Bytes> made;
    for (int64_t rank = 0; rank < ranks; ++rank) made.push_back(bytes(size));
    return made;
  }

  // Payloads of any length: all that is left, shared out among the ranks.
  std::vector<Bytes> sections(int64_t ranks) {
    std::vector<Bytes> made;
    for (int64_t rank = 1; rank < ranks; ++rank) made.push_back(bytes(below(left_ + 1)));
    made.push_back(bytes(left_));
    return made;
  }

  Dtype dtype() { return Dtype(below(4)); }
  Stream key() { return {uint32_t(byte()), uint32_t(byte()), uint32_t(byte()) << 8, 1, 2}; }
  int64_t left() const { return left_; }

 private:
  const uint8_t* at_;
  int64_t left_;
};

template <class T> std::vector<T*> pointers(const std::vector<Bytes>& parts) {
  std::vector<T*> made;
  for (const Bytes& part : parts) made.push_back(part.as<T>());
  return made;
}
inline std::vector<Section> as_sections(const std::vector<Bytes>& parts) {
  std::vector<Section> made;
  for (const Bytes& part : parts) made.push_back({part.get(), part.size});
  return made;
}

inline int64_t width(Dtype dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }
inline Dtype work_type(Dtype dtype) { return dtype == kFloat64 ? kFloat64 : kFloat32; }
inline int64_t work_width(Dtype dtype) { return dtype == kFloat64 ? 8 : 4; }

constexpr Launch kHere{1, nullptr};

// A law that does not hold is a crash, as for both engines.
inline void require(bool holds, const char* law) {
  if (holds) return;
  fprintf(stderr, "does not hold: %s\n", law);
  abort();
}

}  // namespace hvc::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
