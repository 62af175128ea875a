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

void norm_offer_all(const Rows<4>& rows, int dtype, int power, Address counters, Address launch) {
  std::vector<hvc::NormOffered> tensors;
  for (const auto& [grad, count, row_length, norms] : rows)
    tensors.push_back({at<void>(grad), count, row_length, at<void>(norms)});
  hvc::norm_offer_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), hvc::Power(power),
                      at<int64_t>(counters), launch_of(launch));
}

void moments_offer_all(const Rows<5>& rows, int dtype, Address counters, Address launch) {
  std::vector<hvc::MomentsOffered> tensors;
  for (const auto& [grad, count, row_length, largest, squares] : rows)
    tensors.push_back({at<void>(grad), count, row_length, at<void>(largest), at<double>(squares)});
  hvc::moments_offer_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), at<int64_t>(counters),
                         launch_of(launch));
}

void level_encode_all(const Rows<7>& rows, int dtype, int bits, int levels, const KeyWords& key, Address launch) {
  const hvc::Stream stream = stream_of(key);
  std::vector<hvc::LevelEncoded> tensors;
  for (const auto& [grad, norms, count, row_length, offset, codes, bounds] : rows)
    tensors.push_back({at<void>(grad), at<void>(norms), count, row_length, offset, at<void>(codes), at<void>(bounds)});
  hvc::level_encode_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), bits, levels, &stream,
                        launch_of(launch));
}

void level_decode_all(const Rows<5>& rows, int bits, double scale, int dtype, Address launch) {
  std::vector<hvc::LevelDecoded> tensors;
  for (const auto& [codes, norms, count, row_length, grad] : rows)
    tensors.push_back({at<void>(codes), at<void>(norms), count, row_length, at<void>(grad)});
  hvc::level_decode_all(tensors.data(), int64_t(tensors.size()), bits, scale, hvc::Dtype(dtype), launch_of(launch));
}

void octave_encode_all(const Rows<6>& rows, int dtype, int bits, int headroom, const KeyWords& key, Address launch) {
  const hvc::Stream stream = stream_of(key);
  std::vector<hvc::OctaveEncoded> tensors;
  for (const auto& [grad, norms, count, row_length, offset, codes] : rows)
    tensors.push_back({at<void>(grad), at<void>(norms), count, row_length, offset, at<uint8_t>(codes)});
  hvc::octave_encode_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), bits, headroom, &stream,
                         launch_of(launch));
}

void octave_decode_all(const Rows<5>& rows, int bits, int headroom, double scale, int dtype, Address launch) {
  std::vector<hvc::OctaveDecoded> tensors;
  for (const auto& [codes, norms, count, row_length, grad] : rows)
    tensors.push_back({at<uint8_t>(codes), at<void>(norms), count, row_length, at<void>(grad)});
  hvc::octave_decode_all(tensors.data(), int64_t(tensors.size()), bits, headroom, scale, hvc::Dtype(dtype),
                         launch_of(launch));
}

void qsgd_encode_all(const Rows<4>& rows, int dtype, int bits, int64_t block, int power, const KeyWords& key,
                     Address counters, Address launch) {
  const hvc::Stream stream = stream_of(key);
  std::vector<hvc::QsgdEncoded> tensors;
  for (const auto& [grad, count, offset, records] : rows)
    tensors.push_back({at<void>(grad), count, offset, at<uint8_t>(records)});
  hvc::qsgd_encode_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), qsgd_shape(bits, block, power),
                       &stream, at<int64_t>(counters), launch_of(launch));
}

void qsgd_decode_all(const Rows<3>& rows, int dtype, int bits, int64_t block, double scale, Address launch) {
  std::vector<hvc::QsgdDecoded> tensors;
  for (const auto& [records, count, grad] : rows) tensors.push_back({at<uint8_t>(records), count, at<void>(grad)});
  hvc::qsgd_decode_all(tensors.data(), int64_t(tensors.size()), hvc::Dtype(dtype), qsgd_shape(bits, block, 0), scale,
                       launch_of(launch));
}

void define_quantise(py::module_& module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("moments_offer", &moments_offer, unlocked());
  module.def("octave_fold", &octave_fold, unlocked());
  module.def("qsgd_encode", &qsgd_encode, unlocked());
  module.def("qsgd_fold", &qsgd_fold, unlocked());
  module.def("qsgd_decode", &qsgd_decode, unlocked());
  module.def("norm_offer_all", &norm_offer_all, unlocked());
  module.def("moments_offer_all", &moments_offer_all, unlocked());
  module.def("level_encode_all", &level_encode_all, unlocked());
  module.def("level_decode_all", &level_decode_all, unlocked());
  module.def("octave_encode_all", &octave_encode_all, unlocked());
  module.def("octave_decode_all", &octave_decode_all, unlocked());
  module.def("qsgd_encode_all", &qsgd_encode_all, unlocked());
  module.def("qsgd_decode_all", &qsgd_decode_all, unlocked());
}
