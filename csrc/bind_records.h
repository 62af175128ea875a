// The part of bind.h for signs with a scale for each block; included there, inside its namespace.

int64_t record_offer(Address grad, Address residual, int dtype, int64_t count, int64_t block, int rule, Address records,
                     Address counter, Address launch) {
  int64_t nonfinite = 0;
  hvc::record_offer(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), count, block, hvc::ScaleRule(rule),
                    at<uint8_t>(records), counter ? at<int64_t>(counter) : &nonfinite, launch_of(launch));
  return nonfinite;
}

void record_fold(const std::vector<Address>& parts, int dtype, int64_t count, int64_t block, int rule, Address kept,
                 Address left, Address out, Address launch) {
  static_assert(sizeof(Address) == sizeof(uint8_t*), "addresses are passed as integers");
  hvc::record_fold(reinterpret_cast<const uint8_t* const*>(parts.data()), int64_t(parts.size()), hvc::Dtype(dtype),
                   count, block, hvc::ScaleRule(rule), at<void>(kept), at<void>(left), at<uint8_t>(out),
                   launch_of(launch));
}

void record_decode(Address records, Address scales, int dtype, int64_t count, int64_t block, double scale, Address grad,
                   Address residual, Address launch) {
  hvc::record_decode(at<uint8_t>(records), at<float>(scales), hvc::Dtype(dtype), count, block, scale, at<void>(grad),
                     at<void>(residual), launch_of(launch));
}

void define_records(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("record_offer", &record_offer, unlocked());
  module.def("record_fold", &record_fold, unlocked());
  module.def("record_decode", &record_decode, unlocked());
}
