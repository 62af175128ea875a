// The part of bind.h for Adam's second moment; included there, inside its namespace.

void adam_hold_all(const Rows<7>& rows, int dtype, double share, double least, double wanted, double coming,
                   double taken, Address launch) {
  std::vector<hvc::AdamHeld> tensors;
  for (const auto& [second, first, grad, square, floors, count, row_length] : rows)
    tensors.push_back(
        {at<void>(second), at<void>(first), at<void>(grad), at<void>(square), at<void>(floors), count, row_length});
  hvc::adam_hold_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), {share, least, wanted, coming, taken},
                     launch_of(launch));
}

void define_adam(py::module_& module) {
  module.def("adam_hold_all", &adam_hold_all, py::call_guard<py::gil_scoped_release>());
}
