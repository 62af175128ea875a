// The part of bind.h that sends positions with values, and samples; included there, inside its namespace.

int64_t values_encode(Address positions, int64_t kept, Address values, Address mean, int dtype, int form, int64_t count,
                      int parameter, Address out, Address launch) {
  return hvc::values_encode(at<int32_t>(positions), kept, at<void>(values), at<void>(mean), hvc::Dtype(dtype),
                            hvc::ValueForm(form), count, parameter, at<uint8_t>(out), launch_of(launch));
}

int64_t values_decode(const std::vector<std::pair<Address, int64_t>>& sections, int64_t own, int form, int parameter,
                      int dtype, int64_t count, double scale, Address grad, Address residual, Address momentum,
                      double factor, bool masking, Address counter, Address launch) {
  std::vector<hvc::Section> list;
  for (const auto& [data, bytes] : sections) list.push_back({at<uint8_t>(data), bytes});
  int64_t wrong = 0;
  hvc::values_decode(list.data(), int64_t(list.size()), own, hvc::ValueForm(form), parameter, hvc::Dtype(dtype), count,
                     scale, at<void>(grad), at<void>(residual), at<void>(momentum), factor, masking,
                     counter ? at<int64_t>(counter) : &wrong, launch_of(launch));
  return wrong;
}

int64_t sample_offer(Address grad, Address residual, int dtype, int64_t count, int64_t k, const KeyWords& key,
                     int64_t first, Address values, Address counter, Address launch) {
  const hvc::Stream stream = stream_of(key);
  int64_t nonfinite = 0;
  hvc::sample_offer(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), count, k, &stream, first, at<void>(values),
                    counter ? at<int64_t>(counter) : &nonfinite, launch_of(launch));
  return nonfinite;
}

void sample_decode(Address values, int dtype, int64_t count, int64_t k, const KeyWords& key, int64_t first,
                   double scale, bool weighted, Address grad, Address residual, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::sample_decode(at<void>(values), hvc::Dtype(dtype), count, k, &stream, first, scale, weighted, at<void>(grad),
                     at<void>(residual), launch_of(launch));
}

void define_values(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("values_encode", &values_encode, unlocked());
  module.def("values_decode", &values_decode, unlocked());
  module.def("sample_offer", &sample_offer, unlocked());
  module.def("sample_decode", &sample_decode, unlocked());
}
