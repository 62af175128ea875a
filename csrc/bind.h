// What both Python modules share: every kernel of kernels.h under its own name, with its own arguments in their order.
//
// Python passes integers: addresses, 0 for none, numbers and enumerators. What else an argument may be is said by
// `Argument`. A kernel for a batch takes a row of integers for each tensor, in the order of the members of its struct;
// the number of tensors is that of the rows. A count, which stands before `launch`, goes to the address that is given;
// for 0 it is returned.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace py = pybind11;

namespace {

using Address = uintptr_t;

hvc::Launch launch_of(Address launch);  // each module has its own: the number of threads, or the stream

// Structs whose members are 8 bytes each, and were a row of integers each.
template <class Members> struct Rows {
  std::vector<Members> list;
};

// The six words of a key, or none.
struct MaybeKey {
  bool present = false;
  hvc::Stream stream{};
};

// Reads the integers of a sequence of `count`; false where one does not fit. In plain C: for a small tensor it is a
// good part of a call.
template <class Integer> bool read_integers(PyObject* sequence, Integer* into, Py_ssize_t count) {
  const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(sequence, "a sequence of integers"));
  bool good = fast && PySequence_Fast_GET_SIZE(fast.ptr()) == count;
  for (Py_ssize_t i = 0; good && i < count; ++i) {
    const long long value = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast.ptr(), i));
    into[i] = Integer(value);
    good = static_cast<long long>(into[i]) == value && !(value == -1 && PyErr_Occurred());
  }
  PyErr_Clear();
  return good;
}

}  // namespace

namespace pybind11::detail {

template <class Members> struct type_caster<Rows<Members>> {
  PYBIND11_TYPE_CASTER(Rows<Members>, const_name("collections.abc.Sequence[collections.abc.Sequence[int]]"));
  bool load(handle source, bool) {
    constexpr size_t kMembers = sizeof(Members) / sizeof(int64_t);
    static_assert(std::is_trivially_copyable_v<Members> && sizeof(Members) % sizeof(int64_t) == 0);
    const auto rows = reinterpret_steal<object>(PySequence_Fast(source.ptr(), "a sequence of rows"));
    if (!rows) PyErr_Clear();
    if (!rows) return false;
    value.list.resize(size_t(PySequence_Fast_GET_SIZE(rows.ptr())));
    int64_t members[kMembers];
    for (size_t i = 0; i < value.list.size(); ++i) {
      if (!read_integers(PySequence_Fast_GET_ITEM(rows.ptr(), Py_ssize_t(i)), members, kMembers)) return false;
      memcpy(static_cast<void*>(&value.list[i]), members, sizeof members);
    }
    return true;
  }
};

template <> struct type_caster<MaybeKey> {
  PYBIND11_TYPE_CASTER(MaybeKey, const_name("collections.abc.Sequence[int] | None"));
  bool load(handle source, bool) {
    uint32_t words[6];
    value.present = !source.is_none();
    if (!value.present) return true;
    if (!read_integers(source.ptr(), words, 6)) return false;
    value.stream = {words[0], words[1], words[2], words[3], words[4], words[5]};
    return true;
  }
};

}  // namespace pybind11::detail

namespace {

// ---- arguments --------------------------------------------------------------------------------------------

// `Given` is what Python passes for an argument of a type, get() the argument.
template <class T, class = void> struct Argument {
  using Given = T;
  explicit Argument(Given given) : value(given) {}
  T get() const { return value; }
  T value;
};

template <class T> struct Argument<T, std::enable_if_t<std::is_enum_v<T>>> {
  using Given = int;
  explicit Argument(Given given) : value(given) {}
  T get() const { return T(value); }
  int value;
};

template <class T> struct Argument<T*, void> {
  using Given = Address;
  explicit Argument(Given given) : value(given) {}
  T* get() const { return reinterpret_cast<T*>(value); }
  Address value;
};

template <class T> struct Argument<T* const*, void> {  // addresses of several arrays
  using Given = std::vector<Address>;
  static_assert(sizeof(Address) == sizeof(T*), "addresses are passed as integers");
  explicit Argument(const Given& given) : value(given) {}
  T* const* get() const { return value.empty() ? nullptr : reinterpret_cast<T* const*>(value.data()); }
  const Given& value;
};

template <class T> struct ListArgument {
  using Given = Rows<T>;
  explicit ListArgument(const Given& given) : value(given) {}
  const T* get() const { return value.list.data(); }
  const Given& value;
};
template <> struct Argument<const hvc::Section*, void> : ListArgument<hvc::Section> {
  using ListArgument::ListArgument;
};
template <> struct Argument<const hvc::Span*, void> : ListArgument<hvc::Span> {
  using ListArgument::ListArgument;
};

template <> struct Argument<const hvc::Stream*, void> {
  using Given = MaybeKey;
  explicit Argument(const Given& given) : value(given) {}
  const hvc::Stream* get() const { return value.present ? &value.stream : nullptr; }
  const Given& value;
};

template <> struct Argument<hvc::QsgdShape, void> {
  using Given = std::tuple<int, int64_t, int>;
  explicit Argument(const Given& given)
      : value{std::get<0>(given), std::get<1>(given), hvc::Power(std::get<2>(given))} {}
  hvc::QsgdShape get() const { return value; }
  hvc::QsgdShape value;
};

template <> struct Argument<hvc::AdamScales<double>, void> {
  using Given = std::array<double, 5>;
  explicit Argument(const Given& given) : value{given[0], given[1], given[2], given[3], given[4]} {}
  hvc::AdamScales<double> get() const { return value; }
  hvc::AdamScales<double> value;
};

template <> struct Argument<hvc::AdamStep<double>, void> {
  using Given = std::array<double, 9>;
  explicit Argument(const Given& g) : value{g[0], g[1], g[2], g[3], g[4] != 0, g[5], g[6], g[7], g[8]} {}
  hvc::AdamStep<double> get() const { return value; }
  hvc::AdamStep<double> value;
};

template <> struct Argument<hvc::SgdStep<double>, void> {
  using Given = std::array<double, 6>;
  explicit Argument(const Given& g) : value{g[0], g[1], g[2], g[3], g[4], g[5] != 0} {}
  hvc::SgdStep<double> get() const { return value; }
  hvc::SgdStep<double> value;
};

template <> struct Argument<hvc::Launch, void> {
  using Given = Address;
  explicit Argument(Given given) : value(launch_of(given)) {}
  hvc::Launch get() const { return value; }
  hvc::Launch value;
};

template <class T> using Given = std::conditional_t<std::is_class_v<typename Argument<T>::Given>,
                                                    const typename Argument<T>::Given&, typename Argument<T>::Given>;

// ---- kernels ----------------------------------------------------------------------------------------------

// Results may not depend on a caller that flushes subnormals or rounds another way: kernels round to nearest and keep
// subnormals, from the first narrowing of an argument on. It is set here, where no compiler sees into the kernel that
// it calls: it may move arithmetic across such a setting. Threads that a kernel starts inherit it.
class [[maybe_unused]] DefaultRounding {
#if defined(__SSE2__)
 public:
  DefaultRounding() : saved_(_mm_getcsr()) {
    if (saved_ != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultRounding() {
    if (saved_ != kDefault) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kDefault = 0x1f80;
  const unsigned saved_;
#elif defined(__aarch64__)
 public:
  DefaultRounding() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~DefaultRounding() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(saved_));
  }

 private:
  uint64_t saved_;
#endif
};

using Guards = py::call_guard<py::gil_scoped_release, DefaultRounding>;

// Where a count goes, if the argument before `launch` is one.
template <class... A> constexpr size_t count_at() {
  using Types = std::tuple<void, void, A...>;
  return std::is_same_v<std::tuple_element_t<sizeof...(A), Types>, int64_t*> ? sizeof...(A) - 2 : sizeof...(A);
}

// What Python passed, or, where it gave no address for a count, another one.
template <bool is_count, class T> decltype(auto) given_or(const T& given, [[maybe_unused]] int64_t* count) {
  if constexpr (is_count)
    return given ? given : reinterpret_cast<Address>(count);
  else
    return (given);
}

template <class R, class... A, size_t... I>
void define(py::module_& module, const char* name, R (*kernel)(A...), std::index_sequence<I...>) {
  constexpr size_t kCount = count_at<A...>();
  const auto call = [kernel](Given<A>... given) {
    [[maybe_unused]] int64_t count = 0;
    const auto run = [&] { return kernel(Argument<A>(given_or<(I == kCount)>(given, &count)).get()...); };
    if constexpr (kCount == sizeof...(A)) {
      return run();
    } else if constexpr (std::is_void_v<R>) {
      run();
      return count;
    } else {
      const auto result = run();
      return std::pair<int64_t, int64_t>(result, count);
    }
  };
  module.def(name, call, Guards());
}

template <class R, class... A> void define(py::module_& module, const char* name, R (*kernel)(A...)) {
  define(module, name, kernel, std::index_sequence_for<A...>{});
}

// For all tensors of a batch, which is no list among other arguments: a count for each of them.
template <class Tensor, class... A, size_t... I> void define_batch(py::module_& module, const char* name,
                                                                   void (*kernel)(const Tensor*, int64_t, A...),
                                                                   std::index_sequence<I...>) {
  constexpr size_t kCount = count_at<A...>();
  const auto call = [kernel](const Rows<Tensor>& rows, Given<A>... given) {
    const std::vector<Tensor>& tensors = rows.list;
    const auto run = [&](int64_t* counts) {
      kernel(tensors.data(), int64_t(tensors.size()), Argument<A>(given_or<(I == kCount)>(given, counts)).get()...);
    };
    if constexpr (kCount == sizeof...(A)) {
      run(nullptr);
    } else {
      std::vector<int64_t> counts(std::get<kCount>(std::tie(given...)) == 0 ? tensors.size() : 0);
      run(counts.data());
      return counts;
    }
  };
  module.def(name, call, Guards());
}

template <class Tensor, class... A,
          class = std::enable_if_t<std::is_class_v<Tensor> &&
                                   !std::is_base_of_v<ListArgument<Tensor>, Argument<const Tensor*>>>>
void define(py::module_& module, const char* name, void (*kernel)(const Tensor*, int64_t, A...)) {
  define_batch(module, name, kernel, std::index_sequence_for<A...>{});
}

#define HVC_DEFINE(name) define(module, #name, &hvc::name);

void define_kernels(py::module_& module) { HVC_EACH_KERNEL(HVC_DEFINE) }

#undef HVC_DEFINE

}  // namespace
