// Python module `_cuda`. The CUDA runtime is linked statically: without a driver the module still loads, and
// device_count() is 0.
#include <cuda_runtime_api.h>

#include "bind.h"

namespace {

hvc::Launch launch_of(Address stream) { return {0, reinterpret_cast<void*>(stream)}; }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // so that nobody later takes it for an error of his own
  return 0;
}

}  // namespace

PYBIND11_MODULE(_cuda, module, py::mod_gil_not_used()) {
  define_kernels(module);
  module.def("device_count", &device_count);
}
