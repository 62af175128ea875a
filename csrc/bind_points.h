// The part of bind.h for signs with two values; included there, inside its namespace.

int64_t points_offer(Address grad, Address residual, int dtype, int64_t count, int64_t row_length, Address bits,
                     Address highs, Address lows, Address ones, Address counter, Address launch) {
  int64_t nonfinite = 0;
  hvc::points_offer(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), count, row_length, at<uint64_t>(bits),
                    at<double>(highs), at<double>(lows), at<int64_t>(ones), counter ? at<int64_t>(counter) : &nonfinite,
                    launch_of(launch));
  return nonfinite;
}

void points_decode(const std::vector<Address>& bits, const std::vector<Address>& highs,
                   const std::vector<Address>& lows, int64_t own, int dtype, int64_t count, int64_t row_length,
                   double scale, Address grad, Address residual, Address launch) {
  hvc::points_decode(addresses<uint64_t>(bits), addresses<float>(highs), addresses<float>(lows), int64_t(bits.size()),
                     own, hvc::Dtype(dtype), count, row_length, scale, at<void>(grad), at<void>(residual),
                     launch_of(launch));
}

void points_offer_all(const Rows<8>& rows, int dtype, Address counters, Address launch) {
  std::vector<hvc::PointsOffered> tensors;
  for (const auto& [grad, residual, count, row_length, bits, highs, lows, ones] : rows)
    tensors.push_back({at<void>(grad), at<void>(residual), count, row_length, at<uint64_t>(bits), at<double>(highs),
                       at<double>(lows), at<int64_t>(ones)});
  hvc::points_offer_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), at<int64_t>(counters),
                        launch_of(launch));
}

void points_decode_all(const Rows<6>& rows, const std::vector<Address>& bits, const std::vector<Address>& highs,
                       const std::vector<Address>& lows, int64_t own, int dtype, double scale, Address launch) {
  std::vector<hvc::PointsDecoded> tensors;
  for (const auto& [count, row_length, first_word, first_row, grad, residual] : rows)
    tensors.push_back({count, row_length, first_word, first_row, at<void>(grad), at<void>(residual)});
  hvc::points_decode_all(tensors.data(), int64_t(tensors.size()), addresses<uint64_t>(bits), addresses<float>(highs),
                         addresses<float>(lows), int64_t(bits.size()), own, hvc::Dtype(dtype), scale,
                         launch_of(launch));
}

void define_points(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("points_offer", &points_offer, unlocked());
  module.def("points_decode", &points_decode, unlocked());
  module.def("points_offer_all", &points_offer_all, unlocked());
  module.def("points_decode_all", &points_decode_all, unlocked());
}
