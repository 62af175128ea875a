// The part of bind.h for signs with two values; included there, inside its namespace.

int64_t points_offer(Address grad, Address residual, int dtype, int64_t count, int64_t row_length, Address bits,
                     Address highs, Address lows, Address ones, Address counter, Address launch) {
  int64_t nonfinite = 0;
  hvc::points_offer(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), count, row_length, at<uint64_t>(bits),
                    at<double>(highs), at<double>(lows), at<int64_t>(ones),
                    counter ? at<int64_t>(counter) : &nonfinite, launch_of(launch));
  return nonfinite;
}

void points_decode(const std::vector<Address>& bits, const std::vector<Address>& highs,
                   const std::vector<Address>& lows, int64_t own, int dtype, int64_t count, int64_t row_length,
                   double scale, Address grad, Address residual, Address launch) {
  static_assert(sizeof(Address) == sizeof(float*), "addresses are passed as integers");
  const auto values = [](const std::vector<Address>& list) {
    return list.empty() ? nullptr : reinterpret_cast<const float* const*>(list.data());
  };
  hvc::points_decode(reinterpret_cast<const uint64_t* const*>(bits.data()), values(highs), values(lows),
                     int64_t(bits.size()), own, hvc::Dtype(dtype), count, row_length, scale, at<void>(grad),
                     at<void>(residual), launch_of(launch));
}

void define_points(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("points_offer", &points_offer, unlocked());
  module.def("points_decode", &points_decode, unlocked());
}
