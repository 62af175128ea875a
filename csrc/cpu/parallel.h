// Sharing a loop among threads. Threads are started per call: that costs tens of microseconds, so only loops that
// take much longer are shared, and there is no pool to outlive a fork.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace hvc {

constexpr int64_t kBytesPerThread = 1 << 20;

// An output this large would only push everything else out of the cache, and reading its lines before
// overwriting them is a third of the traffic: it is written around the cache.
constexpr int64_t kStreamBytes = 8 << 20;
inline bool streams(int64_t bytes) { return bytes >= kStreamBytes; }

// An exception may not leave a thread: the first one of all threads waits here until they have ended.
class FirstError {
 public:
  template <class Body> void keep(const Body& body) noexcept {
    try {
      body();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Splits [0, total) into contiguous ranges and calls body(range index, begin, end) for each. `total` work items
// move `bytes` bytes of memory together.
template <class Body> void parallel_ranges(int threads, int64_t total, int64_t bytes, const Body& body) {
  const int64_t ranges = std::max<int64_t>(1, std::min({int64_t(threads), total, bytes / kBytesPerThread}));
  FirstError error;
  const auto run = [&](int64_t range) {
    error.keep([&] { body(range, total * range / ranges, total * (range + 1) / ranges); });
  };
  std::vector<std::thread> others;
  int64_t started = 1;
  try {
    for (; started < ranges; ++started) others.emplace_back(run, started);
  } catch (const std::exception&) {
    // No more threads or memory to be had: the caller does the rest itself.
  }
  run(0);
  for (int64_t range = started; range < ranges; ++range) run(range);
  for (auto& thread : others) thread.join();
  error.rethrow();
}

// The same where it does not matter which range it is: body(begin, end).
template <class Body> void parallel_for(int threads, int64_t total, int64_t bytes, const Body& body) {
  parallel_ranges(threads, total, bytes, [&](int64_t, int64_t first, int64_t last) { body(first, last); });
}

// Returns the sum of what body(begin, end) returns: counts, for which the order does not matter.
template <class Body> int64_t parallel_sum(int threads, int64_t total, int64_t bytes, const Body& body) {
  std::atomic<int64_t> sum{0};
  parallel_for(threads, total, bytes, [&](int64_t first, int64_t last) { sum += body(first, last); });
  return sum;
}

// Runs body(first, last) on shares of the elements [0, count), in whole chunks: what is drawn and packed together.
template <class Body> void parallel_chunks(int64_t count, int64_t bytes, int threads, const Body& body) {
  constexpr int64_t kChunk = 256;
  parallel_for(threads, (count + kChunk - 1) / kChunk, bytes,
               [&](int64_t first, int64_t last) { body(first * kChunk, std::min(last * kChunk, count)); });
}

}  // namespace hvc
