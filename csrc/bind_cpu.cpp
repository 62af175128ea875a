// Python module `_cpu`.
#include "bind.h"

namespace {

hvc::Launch launch_of(Address threads) { return {int(threads), nullptr}; }

uint32_t crc32c(Address data, int64_t bytes, uint32_t crc) {
  return hvc::crc32c(reinterpret_cast<void*>(data), bytes, crc);
}

uint32_t crc32c_copy(Address into, Address from, int64_t bytes, uint32_t crc) {
  return hvc::crc32c_copy(reinterpret_cast<void*>(into), reinterpret_cast<void*>(from), bytes, crc);
}

std::array<uint32_t, 4> philox4x32(const std::array<uint32_t, 4>& counter, const std::array<uint32_t, 2>& key) {
  const hvc::Counter c = hvc::philox4x32({counter[0], counter[1], counter[2], counter[3]}, key[0], key[1]);
  return {c.c0, c.c1, c.c2, c.c3};
}

}  // namespace

PYBIND11_MODULE(_cpu, module, py::mod_gil_not_used()) {
  define_kernels(module);
  module.def("crc32c", &crc32c, py::call_guard<py::gil_scoped_release>());
  module.def("crc32c_copy", &crc32c_copy, py::call_guard<py::gil_scoped_release>());
  module.def("philox4x32", &philox4x32);
  module.def("instruction_set", &hvc::instruction_set);
}
