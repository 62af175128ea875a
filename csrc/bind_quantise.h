// The part of bind.h for methods that quantise on scales of their own; included there, inside its namespace.

const uint8_t* const* parts_of(const std::vector<Address>& parts) {
  static_assert(sizeof(Address) == sizeof(uint8_t*), "addresses are passed as integers");
  return reinterpret_cast<const uint8_t* const*>(parts.data());
}

hvc::QsgdShape qsgd_shape(int bits, int64_t block, int power) { return {bits, block, hvc::Power(power)}; }

int64_t moments_offer(Address grad, int dtype, int64_t count, int64_t row_length, Address largest, Address squares,
                      Address counter, Address launch) {
  int64_t nonfinite = 0;
  hvc::moments_offer(at<void>(grad), hvc::Dtype(dtype), count, row_length, at<void>(largest), at<double>(squares),
                     counter ? at<int64_t>(counter) : &nonfinite, launch_of(launch));
  return nonfinite;
}

void octave_fold(const std::vector<Address>& parts, int64_t count, int headroom, const KeyWords& key, int64_t offset,
                 Address out, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::octave_fold(parts_of(parts), int64_t(parts.size()), count, headroom, &stream, offset, at<uint8_t>(out),
                   launch_of(launch));
}

int64_t qsgd_encode(Address grad, int dtype, int64_t count, int bits, int64_t block, int power, const KeyWords& key,
                    int64_t offset, Address records, Address counter, Address launch) {
  const hvc::Stream stream = stream_of(key);
  int64_t nonfinite = 0;
  hvc::qsgd_encode(at<void>(grad), hvc::Dtype(dtype), count, qsgd_shape(bits, block, power), &stream, offset,
                   at<uint8_t>(records), counter ? at<int64_t>(counter) : &nonfinite, launch_of(launch));
  return nonfinite;
}

void qsgd_fold(const std::vector<Address>& parts, int64_t blocks, int bits, int64_t block, int power,
               const KeyWords& key, int64_t offset, Address out, Address launch) {
  const hvc::Stream stream = stream_of(key);
  hvc::qsgd_fold(parts_of(parts), int64_t(parts.size()), blocks, qsgd_shape(bits, block, power), &stream, offset,
                 at<uint8_t>(out), launch_of(launch));
}

void qsgd_decode(Address records, int dtype, int64_t count, int bits, int64_t block, double scale, Address grad,
                 Address launch) {
  hvc::qsgd_decode(at<uint8_t>(records), hvc::Dtype(dtype), count, qsgd_shape(bits, block, 0), scale, at<void>(grad),
                   launch_of(launch));
}

void define_quantise(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("moments_offer", &moments_offer, unlocked());
  module.def("octave_fold", &octave_fold, unlocked());
  module.def("qsgd_encode", &qsgd_encode, unlocked());
  module.def("qsgd_fold", &qsgd_fold, unlocked());
  module.def("qsgd_decode", &qsgd_decode, unlocked());
}
