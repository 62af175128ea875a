// All tensors of a bucket in one launch.
//
// What differs between tensors is an item of a table, and the table is an argument of the kernel: nothing is copied
// to the device beforehand, no memory is needed there, and a captured graph holds it. Every item has some units of
// work. The units of all items are numbered in order, and whoever takes one looks for the item that it belongs to.
// In a table of one item there is nothing to look for: a call for one tensor costs what it would cost without.
#pragma once
#include <type_traits>

#include "launch.h"

namespace hvc {
namespace {

// The bytes that the arguments of a kernel may take. CUDA 12.1 allows twice as many; but up to here a launch takes as
// long as with few (2 us on an H100), and with those a microsecond longer.
#if CUDART_VERSION >= 12010
constexpr size_t kArgumentBytes = 16384;
#else
constexpr size_t kArgumentBytes = 4096;
#endif
constexpr size_t kBeside = 256;  // for arguments that are the same for all items, as a rule

template <class Item, int kRoom> struct Table {
  static constexpr int room = kRoom;
  Item items[kRoom];
  int64_t begins[kRoom + 1];  // the first unit of every item, and the end of the last one's
  int64_t count;

  __host__ __device__ int64_t units() const { return begins[kRoom == 1 ? 1 : count]; }

  // The last item that does not begin behind a unit: those without units are passed over.
  __device__ int item_of(int64_t unit) const {
    int found = 0;
    if (kRoom > 1) {
      for (int end = int(count); end - found > 1;) {
        const int middle = (found + end) / 2;
        if (begins[middle] <= unit)
          found = middle;
        else
          end = middle;
      }
    }
    return found;
  }
};

// How many items there is room for beside other arguments.
template <class Item, size_t kOthers> constexpr int kMostItems =
    int((kArgumentBytes - kOthers - 2 * sizeof(int64_t)) / (sizeof(Item) + sizeof(int64_t)));

template <class Item, int kRoom, class ItemOf, class UnitsOf, class Run>
void fill(int64_t first, int64_t count, ItemOf item, UnitsOf units, Run run) {
  Table<Item, kRoom> table{};
  table.count = count;
  for (int64_t i = 0; i < count; ++i) {
    table.items[i] = item(first + i);
    table.begins[i + 1] = table.begins[i] + units(first + i);
  }
  run(table, first);
}

// Calls `run` with a table of all items and 0; only if they do not fit into one, with several and the first of each.
// `item` and `units` say what item i is, and how many units it has.
template <class Item, size_t kOthers = kBeside, class ItemOf, class UnitsOf, class Run>
void in_tables(int64_t count, ItemOf item, UnitsOf units, Run run) {
  constexpr int kMost = kMostItems<Item, kOthers>;
  static_assert(sizeof(Table<Item, kMost>) + kOthers <= kArgumentBytes, "a table fits into the arguments of a kernel");
  if (count == 1) return fill<Item, 1>(0, 1, item, units, run);
  for (int64_t first = 0; first < count; first += kMost)
    fill<Item, kMost>(first, std::min<int64_t>(kMost, count - first), item, units, run);
}

// The same for the tensors of a batch as they were given.
template <class Tensor, class UnitsOf, class Run>
void in_tables_of(const Tensor* tensors, int64_t tensor_count, UnitsOf units, Run run) {
  in_tables<Tensor>(tensor_count, [&](int64_t i) { return tensors[i]; }, units, run);
}

// Clears arrays, those that lie one after the other at once: `array` says where number i is, `bytes` how long.
template <class Array, class Bytes> void clear_all(int64_t count, Array array, Bytes bytes, Launch launch) {
  char *begin = nullptr, *end = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    if (bytes(i) == 0) continue;
    char* next = reinterpret_cast<char*>(array(i));
    if (next != end) {
      clear(begin, end - begin, launch);
      begin = next;
    }
    end = next + bytes(i);
  }
  clear(begin, end - begin, launch);
}

}  // namespace
}  // namespace hvc
