// The part of bind.h for Elias codes; included there, inside its namespace.

std::pair<int64_t, int64_t> elias_encode(Address grad, int dtype, int64_t count, int bits, int64_t block, int power,
                                         const KeyWords& key, int64_t offset, Address out, Address launch) {
  const hvc::Stream stream = stream_of(key);
  int64_t nonfinite = 0;
  const int64_t used = hvc::elias_encode(at<void>(grad), hvc::Dtype(dtype), count, qsgd_shape(bits, block, power),
                                         &stream, offset, at<uint8_t>(out), &nonfinite, launch_of(launch));
  return {used, nonfinite};
}

int64_t elias_decode(const std::vector<std::pair<Address, int64_t>>& sections, int dtype, int64_t count, int bits,
                     int64_t block, double scale, Address grad, Address counter, Address launch) {
  std::vector<hvc::Section> list;
  for (const auto& [data, bytes] : sections) list.push_back({at<uint8_t>(data), bytes});
  int64_t wrong = 0;
  hvc::elias_decode(list.data(), int64_t(list.size()), hvc::Dtype(dtype), count, qsgd_shape(bits, block, 0), scale,
                    at<void>(grad), counter ? at<int64_t>(counter) : &wrong, launch_of(launch));
  return wrong;
}

void define_elias(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("elias_encode", &elias_encode, unlocked());
  module.def("elias_decode", &elias_decode, unlocked());
}
