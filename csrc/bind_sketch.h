// Bindings of the count sketch, and of what feeds it. Included by bind.h, inside its namespace.
#pragma once

int64_t sketch_encode(Address grad, Address residual, Address momentum, double factor, int dtype, int64_t count,
                      int64_t offset, int rows, int64_t places, const KeyWords& key, Address table, Address counter,
                      Address launch) {
  const hvc::Stream stream = stream_of(key);
  int64_t nonfinite = 0;
  hvc::sketch_encode(at<void>(grad), at<void>(residual), at<void>(momentum), factor, hvc::Dtype(dtype), count, offset,
                     rows, places, &stream, at<void>(table), counter ? at<int64_t>(counter) : &nonfinite,
                     launch_of(launch));
  return nonfinite;
}

int64_t sketch_top(Address table, int dtype, int rows, int64_t places, const KeyWords& key,
                   const std::vector<int64_t>& spans, int64_t k, Address positions, Address estimates, Address launch) {
  const hvc::Stream stream = stream_of(key);
  return hvc::sketch_top(at<void>(table), hvc::Dtype(dtype), rows, places, &stream, spans.data(),
                         int64_t(spans.size() / 2), k, at<int64_t>(positions), at<void>(estimates), launch_of(launch));
}

void sketch_estimate(Address table, int dtype, int rows, int64_t places, const KeyWords& key, Address positions,
                     int64_t count, Address estimates, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::sketch_estimate(at<void>(table), hvc::Dtype(dtype), rows, places, &stream, at<int64_t>(positions), count,
                       at<void>(estimates), launch_of(launch));
}

void sketch_clear(Address table, int dtype, int rows, int64_t places, const KeyWords& key, Address positions,
                  int64_t count, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::sketch_clear(at<void>(table), hvc::Dtype(dtype), rows, places, &stream, at<int64_t>(positions), count,
                    launch_of(launch));
}

void absorb(Address grad, Address residual, Address momentum, double factor, int dtype, int64_t count, Address launch) {
  hvc::absorb(at<void>(grad), at<void>(residual), at<void>(momentum), factor, hvc::Dtype(dtype), count,
              launch_of(launch));
}

void define_sketch(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("sketch_encode", &sketch_encode, unlocked());
  module.def("sketch_top", &sketch_top, unlocked());
  module.def("sketch_estimate", &sketch_estimate, unlocked());
  module.def("sketch_clear", &sketch_clear, unlocked());
  module.def("absorb", &absorb, unlocked());
}
