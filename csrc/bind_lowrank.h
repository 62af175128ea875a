// The part of bind.h for factors of low rank; included there, inside its namespace.

void lowrank_start(Address kept, int dtype, int64_t columns, int64_t rank, const KeyWords& key, int64_t offset,
                   Address right, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::lowrank_start(at<void>(kept), hvc::Dtype(dtype), columns, rank, &stream, offset, at<void>(right),
                     launch_of(launch));
}

int64_t lowrank_left(Address grad, Address residual, int dtype, int64_t rows, int64_t columns, int64_t rank,
                     Address right, Address left, Address counter, Address launch) {
  int64_t nonfinite = 0;
  hvc::lowrank_left(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), rows, columns, rank, at<void>(right),
                    at<void>(left), counter ? at<int64_t>(counter) : &nonfinite, launch_of(launch));
  return nonfinite;
}

void lowrank_orthonormalise(Address lines, int dtype, int64_t count, int64_t rank, Address launch) {
  hvc::lowrank_orthonormalise(at<void>(lines), hvc::Dtype(dtype), count, rank, launch_of(launch));
}

void lowrank_right(Address grad, Address residual, int dtype, int64_t rows, int64_t columns, int64_t rank, Address left,
                   Address right, Address launch) {
  hvc::lowrank_right(at<void>(grad), at<void>(residual), hvc::Dtype(dtype), rows, columns, rank, at<void>(left),
                     at<void>(right), launch_of(launch));
}

void lowrank_decode(Address left, Address right, int dtype, int64_t rows, int64_t columns, int64_t rank, double scale,
                    Address grad, Address residual, Address launch) {
  hvc::lowrank_decode(at<void>(left), at<void>(right), hvc::Dtype(dtype), rows, columns, rank, scale, at<void>(grad),
                      at<void>(residual), launch_of(launch));
}

void define_lowrank(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("lowrank_start", &lowrank_start, unlocked());
  module.def("lowrank_left", &lowrank_left, unlocked());
  module.def("lowrank_orthonormalise", &lowrank_orthonormalise, unlocked());
  module.def("lowrank_right", &lowrank_right, unlocked());
  module.def("lowrank_decode", &lowrank_decode, unlocked());
}
