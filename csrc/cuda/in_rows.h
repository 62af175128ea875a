// Elements of which those of one row have something in common, such as a scale: a warp finds it once for all of its
// elements where they lie in one row, as nearly always, and divides for each of them only where they do not.
#pragma once
#include "rows.h"

namespace hvc {
namespace {

// So many elements of each lane in one go, 32 apart: their loads are under way at once.
constexpr int kOfLane = 8;
constexpr int64_t kOfWarp = kOfLane * kWarp;

// The elements of a unit of work. Several goes share what comes before them: with several tensors, the search for one.
__host__ __device__ constexpr int64_t in_goes(bool several) { return (several ? 4 : 2) * kOfWarp; }
template <class Tensor> auto units_of_goes(const Tensor* tensors, int64_t tensor_count) {
  return [=](int64_t i) { return ceil_div(tensors[i].count, in_goes(tensor_count > 1)); };
}
inline int64_t units_of_goes(int64_t count) { return ceil_div(count, in_goes(false)); }

// The elements [0, count), cut into rows.
struct Rows {
  int64_t length, count;
};
struct OwnRows {
  template <class Tensor> __device__ Rows operator()(const Tensor& t) const { return {t.row_length, t.count}; }
};
struct NoRows {
  __device__ NoRows operator()(int64_t) const { return {}; }
};

// One go: the elements that there are of kOfWarp from `first` on. Where it is whole, all lanes have all of theirs, and
// come everywhere together; row_at(i) is what the elements share.
template <bool kWhole, class RowAt> struct Go {
  int64_t first, count;
  const RowAt& row_at;
  static constexpr bool whole = kWhole;
};

// Calls body(go) for the elements of [begin, end); what the elements of a row share is of_row(its number).
template <class OfRow, class Body>
__device__ void each_go(int64_t begin, int64_t end, const Rows& rows, const OfRow& of_row, const Body& body) {
  int64_t row_end = begin;
  auto mine = decltype(of_row(begin)){};
  for (int64_t first = begin; first < end; first += kOfWarp) {
    if (first >= row_end) {
      const int64_t row = row_of(first, rows.length, rows.count);
      row_end = rows.length >= rows.count ? rows.count : min((row + 1) * rows.length, rows.count);
      mine = of_row(row);
    }
    const auto shared = [&](int64_t) { return mine; };
    const auto own = [&](int64_t i) { return of_row(row_of(i, rows.length, rows.count)); };
    if (first + kOfWarp <= row_end)
      body(Go<true, decltype(shared)>{first, rows.count, shared});
    else
      body(Go<false, decltype(own)>{first, rows.count, own});
  }
}

// The same for this warp's part of all tensors of a table: rows_of(tensor), of_row(tensor, row), body(tensor, go).
template <class Table, class RowsOf, class OfRow, class Body>
__device__ void each_go_of(const Table& table, const RowsOf& rows_of, const OfRow& of_row, const Body& body) {
  constexpr int64_t kMost = in_goes(Table::room > 1);
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const auto& tensor = table.items[item];
    const int64_t begin = (unit - table.begins[item]) * kMost;
    each_go(
        begin, min(begin + kMost, tensor.count), rows_of(tensor), [&](int64_t row) { return of_row(tensor, row); },
        [&](const auto& go) { body(tensor, go); });
  }
}

// And of elements that are no table's: of rows, or without.
template <class OfRow, class Body>
__device__ void each_go_of(int64_t count, const Rows& rows, const OfRow& of_row, const Body& body) {
  for (int64_t begin = first_warp() * in_goes(false); begin < count; begin += warp_stride() * in_goes(false))
    each_go(begin, min(begin + in_goes(false), count), rows, of_row, body);
}
template <class Body> __device__ void each_go_of(int64_t count, const Body& body) {
  each_go_of(count, {count, count}, NoRows(), body);
}

// Element `i`, the lane's k-th of this go.
struct Place {
  int64_t i;
  int k;
};

// What is loaded from two arrays.
template <class A, class B = A> struct Two {
  A mine;
  B other;
};

struct Nothing {
  __device__ void operator()() const {}
};

// Calls use(place, load(i, row), row) for a lane's elements of a go; between the loads and the uses comes `meanwhile`,
// for all lanes.
template <class AGo, class Load, class Use, class Meanwhile = Nothing>
__device__ void each_of_go(const AGo& go, const Load& load, const Use& use, const Meanwhile& meanwhile = {}) {
  const int64_t begin = go.first + lane_index();
  decltype(load(begin, go.row_at(begin))) values[kOfLane];
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    int64_t i = begin + k * kWarp;
    if (!go.whole) i = min(i, go.count - 1);  // no branch: all loads are under way
    values[k] = load(i, go.row_at(i));
  }
  meanwhile();
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    const int64_t i = begin + k * kWarp;
    if (go.whole || i < go.count) use(Place{i, k}, values[k], go.row_at(i));
  }
}

}  // namespace
}  // namespace hvc
