// The norm of every block of a gradient, and how many values are not finite, in one pass.
#include "rules/norm.h"
#include "rows.h"
#include "trees.h"
#include "visit.h"

namespace hvc {
namespace {

// What a pass finds of a block, and of a row; and where that is put.
template <class T> struct Largest {
  double largest;
  __device__ void take(const Largest& other) { largest = max(largest, other.largest); }
  struct Put {
    Work<T>* norms;
    double* sums;
    __device__ void operator()(int64_t row, const Largest& found) const { norms[row] = Work<T>(found.largest); }
  };
};
template <class T> struct PowerSum {
  double sum;
  __device__ void take(const PowerSum& other) { sum += other.sum; }
  struct Put {
    Work<T>* norms;
    double* sums;
    __device__ void operator()(int64_t row, const PowerSum& found) const { sums[row] = canonical(found.sum); }
  };
};
template <class T> struct Moments {
  double largest, sum;
  __device__ void take(const Moments& other) {
    largest = max(largest, other.largest);
    sum += other.sum;
  }
  struct Put {
    Work<T>* norms;
    double* sums;
    __device__ void operator()(int64_t row, const Moments& found) const {
      norms[row] = Work<T>(found.largest);
      sums[row] = canonical(found.sum);
    }
  };
};

template <class Of> using AddingOf = Adding<Of, typename Of::Put>;

template <class Of, class T> struct Offered {
  const T* grad;
  AddingOf<Of> adding;
};

// ---- kernels ----------------------------------------------------------------------------------------------

// The largest needs no order, and bits of magnitudes are ordered like these.
template <class T> __device__ Bits<T> largest_of_warp(Bits<T> lane) {
  for (int half = kWarp / 2; half > 0; half /= 2) {
    const Bits<T> other = Bits<T>(__shfl_down_sync(kAllLanes, lane, half));
    lane = other > lane ? other : lane;
  }
  return lane;
}

// What a lane finds of the elements of a block.
template <class T> struct OfLane {
  double sum = 0;
  Bits<T> largest = 0;
  int bad = 0;
};

// There is one array to read, so more of it is under way.
template <class T> constexpr int kOfOne = sizeof(T) == 8 ? kGroups : 2 * kGroups;

template <Power kPower, bool kLargest, bool kWhole, class T>
__device__ void take_groups(const T* grad, int left, OfLane<T>& found) {
  T values[kOfOne<T>];
#pragma unroll
  for (int k = 0; k < kOfOne<T>; ++k) values[k] = kWhole || k * kWarp < left ? grad[k * kWarp] : T{};
#pragma unroll
  for (int k = 0; k < kOfOne<T>; ++k) {
    const Bits<T> size = magnitude_bits(values[k]);
    const bool finite = size < kInfinityBits<T>;
    found.bad += !finite;
    if (kPower != kMaximum) found.sum += raised<kPower>(finite ? magnitude(double(to_work(values[k]))) : 0.0);
    if (kLargest) found.largest = finite && size > found.largest ? size : found.largest;
  }
}

// Takes a block of 1024 elements, lane by lane as rules/tree.h says.
template <Power kPower, bool kLargest, class Of, class T>
__device__ Of take_block(const T* block, int count, int& bad) {
  OfLane<T> lane;
  for (int first = 0; first < count; first += kOfOne<T> * kWarp) {
    const T* grad = block + first + lane_index();
    if (count == kBlock)
      take_groups<kPower, kLargest, true>(grad, 0, lane);
    else
      take_groups<kPower, kLargest, false>(grad, count - first - lane_index(), lane);
  }
  bad += lane.bad;
  Of found{};
  if constexpr (kPower != kMaximum) found.sum = combine_warp(lane.sum);
  if constexpr (kLargest) found.largest = double(to_work(bit_cast<T>(largest_of_warp<T>(lane.largest))));
  return found;
}

// Fewer blocks on a multiprocessor: else the compiler saves registers, and waits for every few of the loads.
template <Power kPower, bool kLargest, class Of, class T, class Table> __global__ void __launch_bounds__(kThreads, 4)
    norms_kernel(const __grid_constant__ Table table, int64_t* nonfinite) {
  each_stretch(table, nonfinite, [](const Offered<Of, T>& o, int64_t begin, int count, int& bad) {
    return take_block<kPower, kLargest, Of>(o.grad + begin, count, bad);
  });
}

// ---- launchers --------------------------------------------------------------------------------------------

// One pass for the largest |x| and for the sum of a power, or for one of them: `tensor` says where of each.
template <Power kPower, bool kLargest, class Of, class T, class TensorOf>
void run(int64_t tensor_count, TensorOf tensor, int64_t* nonfinite, Launch launch) {
  const auto shape = [&](int64_t i) { return std::pair(tensor(i).count, tensor(i).row_length); };
  const auto units = [&](int64_t i) { return groups_in(tensor(i).count, tensor(i).row_length); };
  const Trees<Of> trees(tensor_count, shape, true, launch);
  const auto adding = [&](int64_t i) {
    const MomentsOffered& t = tensor(i);
    return AddingOf<Of>{trees.of(i, t.count, t.row_length), {static_cast<Work<T>*>(t.largest), t.squares}};
  };
  const auto item = [&](int64_t i) { return Offered<Of, T>{static_cast<const T*>(tensor(i).grad), adding(i)}; };
  in_tables<Offered<Of, T>>(tensor_count, item, units, [&](const auto& table, int64_t first) {
    start_groups(norms_kernel<kPower, kLargest, Of, T, std::decay_t<decltype(table)>>, table.units(), launch, table,
                 nonfinite + first);
  });
  trees.add(tensor_count, adding, launch);
}

}  // namespace

void norm_offer(const NormOffered* tensors, int64_t tensor_count, Dtype dtype, Power power, int64_t* nonfinite,
                Launch launch) {
  // Norms are the one or the other of two moments.
  const auto tensor = [&](int64_t i) {
    const NormOffered& t = tensors[i];
    return MomentsOffered{t.grad, t.count, t.row_length, t.norms, static_cast<double*>(t.norms)};
  };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (power == kMaximum)
      run<kMaximum, true, Largest<T>, T>(tensor_count, tensor, nonfinite, launch);
    else if (power == kPower1)
      run<kPower1, false, PowerSum<T>, T>(tensor_count, tensor, nonfinite, launch);
    else if (power == kPower2)
      run<kPower2, false, PowerSum<T>, T>(tensor_count, tensor, nonfinite, launch);
    else
      run<kPower4, false, PowerSum<T>, T>(tensor_count, tensor, nonfinite, launch);
  });
}

void moments_offer(const MomentsOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t* nonfinite,
                   Launch launch) {
  const auto tensor = [&](int64_t i) { return tensors[i]; };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    run<kPower2, true, Moments<T>, T>(tensor_count, tensor, nonfinite, launch);
  });
}

}  // namespace hvc
