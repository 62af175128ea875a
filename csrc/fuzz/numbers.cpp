// Plain numbers from other ranks, any of them NaN or infinite: sketches, factors, samples, selection, and unions.
#include "rules/sketch.h"

#include "fuzz/input.h"

using namespace hvc;
using namespace hvc::fuzz;

namespace {

// A table that arrived: its largest elements lie inside the spans, in order, each once.
void sketch(Input& in, Dtype dtype) {
  constexpr int64_t kPlaces[] = {2, 3, 5, 7, 13, 31};
  const Dtype kind = dtype == kFloat64 ? kFloat64 : kFloat32;
  const int rows = int(1 + 2 * in.below(3));
  const int64_t places = kPlaces[in.below(6)], count = 1 + in.below(2000), k = in.below(count + 1);
  const Stream key = in.key();
  const Bytes table = in.bytes(rows * places * kSketchBlock * width(kind));
  const int64_t cut = in.below(count);
  const Span spans[] = {{0, cut}, {ceil_div(cut, 64) * 64, count - cut}};
  const Bytes positions(8 * k), estimates(width(kind) * k);
  const int64_t found =
      sketch_top(table.get(), kind, rows, places, &key, spans, 2, k, positions.as<int64_t>(), estimates.get(), kHere);
  require(found >= 0 && found <= k, "no more are found than were asked for");
  for (int64_t i = 0; i < found; ++i) {
    const int64_t at = positions.as<int64_t>()[i];
    require((at >= 0 && at < cut) || (at >= spans[1].start && at < spans[1].start + spans[1].count),
            "inside the spans");
    require(i == 0 || positions.as<int64_t>()[i - 1] < at, "positions ascend");
  }
  sketch_clear(table.get(), kind, rows, places, &key, positions.as<int64_t>(), found, kHere);
}

void lowrank(Input& in, Dtype dtype) {
  const int64_t rows = 1 + in.below(40), columns = 1 + in.below(40), rank = 1 + in.below(5), wide = work_width(dtype);
  const Stream key = in.key();
  const Bytes left = in.bytes(wide * rows * rank), right = in.bytes(wide * columns * rank), fresh(right.size);
  const Bytes grad = in.bytes(width(dtype) * rows * columns), residual(wide * rows * columns);
  lowrank_start(right.get(), dtype, columns, rank, &key, 0, fresh.get(), kHere);
  lowrank_orthonormalise(left.get(), dtype, rows, rank, kHere);
  lowrank_right(grad.get(), residual.get(), dtype, rows, columns, rank, left.get(), fresh.get(), kHere);
  lowrank_decode(left.get(), right.get(), dtype, rows, columns, rank, 0.5, grad.get(), residual.get(), kHere);
}

void sample(Input& in, Dtype dtype) {
  const int64_t count = 1 + in.below(3000), k = 1 + in.below(count);
  const bool weighted = in.coin(), keeps = in.coin();
  const Stream key = in.key();
  const Bytes values = in.bytes(work_width(dtype) * k), grad = in.bytes(width(dtype) * count);
  const Bytes residual(work_width(dtype) * count);
  int64_t nonfinite = 0;
  sample_decode(values.get(), dtype, count, 1, k, &key, 0, 0.5, weighted, grad.get(), keeps ? residual.get() : nullptr,
                kHere);
  sample_offer(grad.get(), keeps ? residual.get() : nullptr, dtype, count, 1, k, &key, 0, values.get(), &nonfinite,
               kHere);
}

void select(Input& in, Dtype dtype) {
  const int64_t count = in.below(3000), k = in.below(count + 1);
  const Bytes grad = in.bytes(width(dtype) * count), residual = in.bytes(work_width(dtype) * count);
  const Bytes positions(4 * k), values(work_width(dtype) * k), mean(8);
  const bool binary = in.coin();
  int64_t found[kSelected];
  const TopSelected top{grad.get(), residual.get(), count, k, positions.as<int32_t>(), values.get(), found};
  const BinarySelected one_side{grad.get(), residual.get(), count, k, positions.as<int32_t>(), mean.get(), found};
  if (binary)
    binary_select(&one_side, 1, dtype, false, kHere);
  else
    top_select(&top, 1, dtype, false, kHere);
  require(found[0] >= 0 && found[0] <= k && found[1] <= count, "no more are found than were asked for");
  for (int64_t i = 0; i < found[0]; ++i) {
    const int32_t at = positions.as<int32_t>()[i];
    require(at >= 0 && at < count && (i == 0 || positions.as<int32_t>()[i - 1] < at), "positions ascend");
  }
}

void dense(Input& in, Dtype dtype) {
  const int64_t count = in.below(3000);
  const Dtype payload_dtype = in.dtype();
  const Bytes payload = in.bytes(width(payload_dtype) * count), other = in.bytes(payload.size);
  const Bytes grad(width(dtype) * count);
  dense_add(payload.get(), other.get(), payload_dtype, count, kHere);
  const DenseDecoded tensor{payload.get(), count, grad.get(), nullptr};
  dense_decode(&tensor, 1, payload_dtype, dtype, dtype, 0.5, kHere);
}

// Bits that arrived, of any blocks, and as many values as somebody believes.
void in_union(Input& in, Dtype dtype) {
  const int64_t count = in.below(3000), block = 1 + in.below(200), kept = in.below(count + 1);
  const Bytes bits = in.bytes(8 * words_for(ceil_div(count, block))), grad = in.bytes(width(dtype) * count);
  const Bytes values(work_width(dtype) * kept);
  int64_t found = 0;
  const UnionCounted counted{bits.as<uint64_t>(), count};
  union_count(&counted, 1, block, &found, kHere);
  require(found <= count, "no more elements than there are");
  const UnionEncoded encoded{grad.get(), bits.as<uint64_t>(), count, kept, values.get()};
  union_encode(&encoded, 1, dtype, block, kHere);
  const UnionDecoded decoded{values.get(), bits.as<uint64_t>(), count, kept, grad.get()};
  union_decode(&decoded, 1, dtype, block, 0.5, kHere);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int64_t method = in.below(6);
  const Dtype dtype = in.dtype();
  if (method == 0) sketch(in, dtype);
  if (method == 1) lowrank(in, dtype);
  if (method == 2) sample(in, dtype);
  if (method == 3) select(in, dtype);
  if (method == 4) dense(in, dtype);
  if (method == 5) in_union(in, dtype);
  return 0;
}
