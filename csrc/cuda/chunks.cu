// The largest elements of every chunk of all tensors: a block takes a chunk, its threads hold the magnitudes.
#include "rules/chunks.h"

#include "rows.h"
#include "scan.h"
#include "select_operands.h"
#include "visit.h"

namespace hvc {
namespace {

constexpr int kOfThread = kMostChunk / kThreads, kWarps = kThreads / kWarp, kSteps = kOfThread * kWarps;

// Adds up a number of each thread; all of them get the sum.
__device__ inline int sum_of_block(int mine, int* of_warps) {
  for (int half = kWarp / 2; half > 0; half /= 2) mine += __shfl_xor_sync(kAllLanes, mine, half);
  if (lane_index() == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  int sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp];
  __syncthreads();
  return sum;
}

// The largest number of any thread, likewise.
template <class W> __device__ W largest_of_block(W mine, W* of_warps) {
  for (int half = kWarp / 2; half > 0; half /= 2) mine = max(mine, __shfl_xor_sync(kAllLanes, mine, half));
  if (lane_index() == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  W largest = 0;
  for (int warp = 0; warp < kWarps; ++warp) largest = max(largest, of_warps[warp]);
  __syncthreads();
  return largest;
}

// Of each 32 elements, in their order: how many equal the cut, and how many are kept; then how many are before them.
struct Tallies {
  int64_t ties[kSteps], kept[kSteps];
};

// A chunk in registers: element 256 i + thread is the thread's i-th; 0 for NaN. Magnitudes are compared as numbers: a
// key above infinity is no number, and nothing reaches it.
template <class W> struct Held {
  W x[kOfThread];

  __device__ bool reaches(int i, Key<W> key) const { return fabs(x[i]) >= bit_cast<W>(key); }
};

// Loads a chunk; returns the largest magnitude of the thread's.
template <class T>
__device__ Work<T> load_chunk(const Input<T>& in, int64_t begin, int size, Held<Work<T>>& held, int64_t* nonfinite) {
  using W = Work<T>;
  const int thread = int(threadIdx.x);
  Bits<W> largest = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    held.x[i] = i * kThreads < size - thread ? offered(in.grad, in.residual, begin + thread + i * kThreads) : W(0);
    largest = max(largest, magnitude_bits(held.x[i]));
  }
  if (largest < kInfinityBits<W>) return bit_cast<W>(largest);
  int bad = 0;
  W most = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    bad += !is_finite(held.x[i]);
    if (held.x[i] != held.x[i]) held.x[i] = 0;
    most = max(most, fabs(held.x[i]));
  }
  add_count(nonfinite, bad);
  return most;
}

// The keys of a chunk that the cut may still be among: bounds rise once k keys have reached one. When those are few, a
// thread has one of them, and none of its own.
template <class W> struct Among {
  using K = Key<W>;
  const Held<W>& held;
  int64_t k;
  K* room;  // of the block, one for each thread
  int* of_warps;
  bool are_few = false;
  K mine = 0;

  __device__ int64_t operator()(K bound) {
    if (are_few) return __syncthreads_count(mine >= bound);
    int own = 0;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) own += held.reaches(i, bound);
    const int number = sum_of_block(own, of_warps);
    if (number > k && number <= kThreads) keep_few(bound, own, number);
    return number;
  }

 private:
  __device__ void keep_few(K bound, int own, int number) {
    __shared__ int before;
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    int at = own > 0 ? atomicAdd(&before, own) : 0;  // in any order
#pragma unroll
    for (int i = 0; i < kOfThread; ++i)
      if (held.reaches(i, bound)) room[at++] = key_of(held.x[i]);
    __syncthreads();
    mine = int(threadIdx.x) < number ? room[threadIdx.x] : 0;
    are_few = true;
  }
};

// Writes what is kept of a chunk, in order, at its place; returns how much.
template <class W> __device__ int64_t keep_of_chunk(const Held<W>& held, Cut<Key<W>> cut, int64_t begin,
                                                    Tallies& tallies, int32_t* positions, W* values) {
  const int warp = int(threadIdx.x) / kWarp, step = int(threadIdx.x);
  const unsigned lower = (1u << lane_index()) - 1;
  const bool tied = cut.ties > 0;
  const Key<W> above = cut.key + 1;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const unsigned kept = __ballot_sync(kAllLanes, held.reaches(i, above));
    if (lane_index() == 0) tallies.kept[i * kWarps + warp] = __popc(kept);
    if (!tied) continue;
    const unsigned reach = __ballot_sync(kAllLanes, held.reaches(i, cut.key));
    if (lane_index() == 0) tallies.ties[i * kWarps + warp] = __popc(reach & ~kept);
  }
  __syncthreads();
  if (tied) {
    const int64_t mine = step < kSteps ? tallies.ties[step] : 0;
    prefix_sums_of_block(kSteps, [&](int64_t i) { return tallies.ties[i]; }, tallies.ties);
    if (step < kSteps) tallies.kept[step] += min(mine, max(cut.ties - tallies.ties[step], int64_t(0)));
    __syncthreads();
  }
  const int64_t number = prefix_sums_of_block(kSteps, [&](int64_t i) { return tallies.kept[i]; }, tallies.kept);
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    bool keeps = held.reaches(i, above);
    if (tied) {
      const bool tie = held.reaches(i, cut.key) && !keeps;
      const unsigned ties = __ballot_sync(kAllLanes, tie);
      keeps |= tie && tallies.ties[i * kWarps + warp] + __popc(ties & lower) < cut.ties;
    }
    const unsigned all = __ballot_sync(kAllLanes, keeps);
    if (keeps) {
      const int at = int(tallies.kept[i * kWarps + warp]) + __popc(all & lower);
      positions[at] = int32_t(begin + i * kThreads + threadIdx.x), values[at] = held.x[i];
    }
  }
  __syncthreads();
  return number;
}

// One tensor.
template <class T> struct Chunked {
  Input<T> in;  // its k is that of a last chunk
  int32_t* positions;
  Work<T>* values;
  int64_t* numbers;

  __host__ __device__ ChunkShape shape(int64_t chunk, int64_t k) const { return {in.count, chunk, k, in.k}; }
};

// What the chunks of a table have kept, one after the other, so many numbers for each.
template <class W> struct OfChunks {
  int32_t* positions;
  W* values;
  int64_t* kept;  // how many
};

template <class T, class Table>
__global__ void select_kernel(const __grid_constant__ Table table, int64_t chunk, int64_t k, OfChunks<Work<T>> out) {
  using W = Work<T>;
  using K = Key<W>;
  __shared__ Tallies tallies;
  __shared__ int of_warps[kWarps];
  __shared__ W largest_of_warps[kWarps];
  __shared__ K room[kThreads];
  for (int64_t unit = blockIdx.x; unit < table.units(); unit += gridDim.x) {
    const int item = table.item_of(unit);
    const Chunked<T>& tensor = table.items[item];
    const ChunkShape s = tensor.shape(chunk, k);
    const int64_t index = unit - table.begins[item], begin = index * chunk, wanted = kept_of_chunk(s, index);
    Held<W> held;
    const W mine = load_chunk(tensor.in, begin, int(chunk_size(s, index)), held, tensor.numbers + 1);
    const W largest = largest_of_block(mine, largest_of_warps);
    const Cut<K> cut = cut_of_chunk(key_of(largest), wanted, Among<W>{held, wanted, room, of_warps});
    const int64_t number = keep_of_chunk(held, cut, begin, tallies, out.positions + unit * k, out.values + unit * k);
    if (threadIdx.x == 0) out.kept[unit] = number;
  }
  if (first_item() == 0) out.kept[table.units()] = 0;  // what is added up ends with the sum of all
}

// Brings what the chunks have kept together; `kept` of all chunks before each.
template <class T, class Table>
__global__ void join_kernel(const __grid_constant__ Table table, int64_t k, OfChunks<Work<T>> out) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Chunked<T>& tensor = table.items[item];
    const int64_t first = out.kept[table.begins[item]], to = out.kept[unit] - first;
    const int64_t number = out.kept[unit + 1] - out.kept[unit];
    if (unit == table.begins[item] && lane_index() == 0) *tensor.numbers = out.kept[table.begins[item + 1]] - first;
    for (int64_t i = lane_index(); i < number; i += kWarp) {
      tensor.positions[to + i] = out.positions[unit * k + i];
      tensor.values[to + i] = out.values[unit * k + i];
    }
  }
}

}  // namespace

void chunk_select(const ChunkSelected* tensors, int64_t tensor_count, Dtype dtype, int64_t chunk, int64_t k,
                  Launch launch) {
  clear_all(
      tensor_count, [&](int64_t i) { return tensors[i].numbers; }, [](int64_t) { return kSelected * sizeof(int64_t); },
      launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto tensor = [&](int64_t i) {
      const ChunkSelected& t = tensors[i];
      return Chunked<T>{input<T>(t.grad, t.residual, t.count, t.last), t.positions, static_cast<W*>(t.values),
                        t.numbers};
    };
    const auto units = [&](int64_t i) { return number_of_chunks(tensor(i).shape(chunk, k)); };
    in_tables<Chunked<T>>(tensor_count, tensor, units, [&](const auto& table, int64_t) {
      using Table = std::decay_t<decltype(table)>;
      const int64_t chunks = table.units();
      if (chunks == 0) return;
      const Scratch<int64_t> kept(chunks + 1, launch);
      const Scratch<int32_t> places(chunks * k, launch);
      const Scratch<W> found(chunks * k, launch);
      const OfChunks<W> out{places.get(), found.get(), kept.get()};
      start_blocks(select_kernel<T, Table>, std::min(chunks, kMostBlocks), kThreads, launch, table, chunk, k, out);
      prefix_sums(kept.get(), kept.get(), chunks + 1, launch);
      start(join_kernel<T, Table>, chunks * kWarp, launch, table, k, out);
    });
  });
}

}  // namespace hvc
