// The addresses of the ranks' payloads, where a kernel can read them.
#pragma once
#include "launch.h"

namespace hvc {

class Parts {
 public:
  Parts(const uint8_t* const* parts, int64_t count, Launch launch) : addresses_(count, launch) {
    // From pageable memory: CUDA has taken its own copy of the list when this returns.
    check(cudaMemcpyAsync(addresses_.get(), parts, size_t(count) * sizeof *parts, cudaMemcpyHostToDevice,
                          stream_of(launch)),
          "cudaMemcpyAsync");
  }
  const uint8_t* const* get() const { return addresses_.get(); }

 private:
  Scratch<const uint8_t*> addresses_;
};

}  // namespace hvc
