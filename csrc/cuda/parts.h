// The addresses of the ranks' payloads, where a kernel can read them.
#pragma once
#include "launch.h"

namespace hvc {

// Few addresses travel with the kernel's arguments: no copy, and a captured graph holds them.
constexpr int64_t kFewParts = 64;

template <class P> struct PartList {
  const P* few[kFewParts];
  const P* const* many;  // in the device's memory, or none

  __device__ const P* operator[](int64_t i) const { return many ? many[i] : few[i]; }
};

template <class P> class Parts {
 public:
  Parts(const P* const* parts, int64_t count, Launch launch) : memory_(count > kFewParts ? count : 0, launch) {
    if (count > kFewParts) {
      cudaStreamCaptureStatus capture;
      check(cudaStreamIsCapturing(stream_of(launch), &capture), "cudaStreamIsCapturing");
      // Replays would copy from a list that is no longer there.
      if (capture != cudaStreamCaptureStatusNone)
        throw std::runtime_error("a CUDA graph cannot hold a call with the parts of more than 64 ranks");
      // From pageable memory: CUDA has taken its own copy of the list when this returns.
      check(cudaMemcpyAsync(memory_.get(), parts, size_t(count) * sizeof *parts, cudaMemcpyHostToDevice,
                            stream_of(launch)),
            "cudaMemcpyAsync");
      list_.many = memory_.get();
    } else if (parts) {
      std::copy(parts, parts + count, list_.few);
    }
  }
  const PartList<P>& list() const { return list_; }

 private:
  Scratch<const P*> memory_;
  PartList<P> list_{};
};

}  // namespace hvc
