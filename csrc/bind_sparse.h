// The part of bind.h that selects and codes positions; included there, inside its namespace.
#pragma once

std::pair<int64_t, int64_t> top_select(Address grad, Address residual, int dtype, int64_t count, int64_t k,
                                       Address positions, Address values, Address launch) {
  int64_t found[2] = {0, 0};
  hvc::top_select(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), count, k, at<int32_t>(positions),
                  at<void>(values), found, launch_of(launch));
  return {found[0], found[1]};
}

std::pair<int64_t, int64_t> binary_select(Address grad, Address residual, int dtype, int64_t count, int64_t k,
                                          Address positions, Address mean, Address launch) {
  int64_t found[2] = {0, 0};
  hvc::binary_select(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), count, k, at<int32_t>(positions),
                     at<void>(mean), found, launch_of(launch));
  return {found[0], found[1]};
}

int64_t binary_encode(Address positions, int64_t kept, Address mean, int value_bytes, int64_t count, int parameter,
                      Address out, Address launch) {
  return hvc::binary_encode(at<int32_t>(positions), kept, at<void>(mean), value_bytes, count, parameter,
                            at<uint8_t>(out), launch_of(launch));
}

int64_t binary_decode(const std::vector<std::pair<Address, int64_t>>& sections, int64_t own, int parameter, int dtype,
                      int64_t count, double scale, Address grad, Address residual, Address counter, Address launch) {
  std::vector<hvc::Section> list;
  for (const auto& [data, bytes] : sections) list.push_back({at<uint8_t>(data), bytes});
  int64_t wrong = 0;
  hvc::binary_decode(list.data(), int64_t(list.size()), own, parameter, hvc::Dtype(dtype), count, scale, at<void>(grad),
                     at<void>(residual), counter ? at<int64_t>(counter) : &wrong, launch_of(launch));
  return wrong;
}

int64_t binary_clear(Address data, int64_t bytes, int parameter, int dtype, int64_t count, Address tensor,
                     Address counter, Address launch) {
  const hvc::Section section{at<uint8_t>(data), bytes};
  int64_t wrong = 0;
  hvc::binary_clear(&section, parameter, hvc::Dtype(dtype), count, at<void>(tensor),
                    counter ? at<int64_t>(counter) : &wrong, launch_of(launch));
  return wrong;
}

void define_sparse_kernels(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("top_select", &top_select, unlocked());
  module.def("binary_select", &binary_select, unlocked());
  module.def("binary_encode", &binary_encode, unlocked());
  module.def("binary_decode", &binary_decode, unlocked());
  module.def("binary_clear", &binary_clear, unlocked());
}
