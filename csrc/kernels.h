// The one list of entry points, the same for the CPU and CUDA builds. Pointers, int64_t counts, no STL.
//
// Legality (types, lengths, devices, overlap) is checked by the Python side. Pointers are aligned to their element
// and no more. Bits are 64-bit words, bit j of word w is element 64 w + j, padding bits are written 0. Nothing
// here depends on the number of threads, the alignment or the instruction set.
//
// What a kernel does with a tensor it does with all tensors of a batch, on CUDA in one launch: their structs have what
// differs between them, in members of 8 bytes. They are of one type and share no memory. An int64_t* before `launch` is
// for counts, one for each tensor of a batch, which begin at 0.
#pragma once
#include "rules/adam.h"
#include "rules/common.h"
#include "rules/golomb.h"
#include "rules/norm.h"
#include "rules/philox.h"
#include "rules/record.h"
#include "rules/sgd.h"
#include "rules/sign.h"
#include "rules/values.h"

namespace hvc {

// How a kernel is started: the CPU reads `threads`, CUDA reads `stream`.
struct Launch {
  int threads;
  void* stream;
};

// How QSGD makes codes: every block has a norm, the maximum or (kPower2) the root of the sum of squares.
struct QsgdShape {
  int bits;
  int64_t block;
  Power norm;
};

// sign.cpp, sign.cu
void sign_pack(const void* x, Dtype dtype, int64_t count, uint64_t* bits, Launch launch);

// An offer writes the sums of rows, as rules/tree.h says, the steps that they make, both or neither. Where there is a
// divisor, gradients are divided by it when they are read, and results multiplied when they are written. Residuals are
// of the arithmetic type, or of kBFloat16 and then rounded by the draws of a stream; see rules/kept.h.
struct SignOffered {
  const void *grad, *residual, *divisor;
  int64_t count, row_length, word_offset;
  uint64_t* bits;
  float* steps;
  double* sums;
};
struct SignDecoded {
  const uint64_t *bits, *zeros;  // `zeros`, or none: where the result is 0, whatever the bit
  const float* steps;
  const void* divisor;
  int64_t count, row_length, word_offset;
  void *grad, *residual;
};
void sign_offer(const SignOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, int64_t ranks,
                float scale, const Stream* key, int64_t* nonfinite, Launch launch);
void sign_decode(const SignDecoded* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, Feedback feedback,
                 double decay, double scale, const Stream* key, const Stream* rounding, Launch launch);

// two_value.cpp, two_value.cu: two values per row, `highs` for bit 1 and `lows` for bit 0, of which a rank sends one
// per element. The offer writes sums of |x| and the number of elements of the high side, per row. Decoding adds the
// values of all ranks in rank order, and keeps what the own ones lack; without `lows` they are -highs. What every rank
// sent lies in arrays for all tensors, in which a tensor's part begins at `first_word` and `first_row`.
struct TwoValueOffered {
  const void *grad, *residual;
  int64_t count, row_length;
  uint64_t* bits;
  double *highs, *lows;
  int64_t* ones;
};
struct TwoValueDecoded {
  int64_t count, row_length, first_word, first_row;
  void *grad, *residual;
};
void two_value_offer(const TwoValueOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype,
                     int64_t* nonfinite, Launch launch);
void two_value_decode(const TwoValueDecoded* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype,
                      const uint64_t* const* bits, const float* const* highs, const float* const* lows, int64_t ranks,
                      int64_t own, double scale, const Stream* rounding, Launch launch);

// merge.cpp, merge.cu: probability numerator / denominator, denominator <= 2^62
void merge_bits(uint64_t* into, const uint64_t* other, int64_t words, uint64_t numerator, uint64_t denominator,
                const Stream* key, int64_t word_offset, Launch launch);
void bernoulli_words(uint64_t* out, int64_t words, uint64_t numerator, uint64_t denominator, const Stream* key,
                     int64_t word_offset, Launch launch);

// shaped.cpp, shaped.cu: counts in `count_rows(ranks)` rows of as many words, read from `before`, written to `after`,
// which may be the same. `into` is of one rank, `other` of all others; ranks <= 65535
void shaped_merge(uint64_t* into, const uint64_t* other, int64_t words, int64_t ranks, const uint64_t* const* before,
                  uint64_t* const* after, Launch launch);
void shaped_fold(const uint64_t* const* parts, int64_t ranks, int64_t words, uint64_t* out,
                 const uint64_t* const* before, uint64_t* const* after, Launch launch);

// ternary.cpp, ternary.cu: counts in `count_rows(ternary_states(ranks))` rows; `words` are whole groups of
// rules/ternary.h, as what is packed is. The fold is of at least two ranks' bits
void ternary_fold(const uint64_t* const* parts, int64_t ranks, int64_t words, uint8_t* out,
                  const uint64_t* const* before, uint64_t* const* after, Launch launch);
void ternary_unpack(const uint8_t* packed, int64_t words, uint64_t* bits, uint64_t* zeros, Launch launch);

// majority.cpp, majority.cu
void majority_fold(const uint64_t* const* parts, int64_t part_count, int64_t count, uint64_t* out, Launch launch);

// dense.cpp, dense.cu
void dense_add(void* into, const void* other, Dtype dtype, int64_t count, Launch launch);
struct DenseOffered {
  const void *grad, *residual;
  int64_t count;
  void* out;
};
struct DenseDecoded {
  const void* payload;
  int64_t count;
  void *grad, *residual;
};
void dense_offer(const DenseOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, Dtype out_dtype,
                 int64_t* nonfinite, Launch launch);
void dense_decode(const DenseDecoded* tensors, int64_t tensor_count, Dtype payload_dtype, Dtype grad_dtype,
                  Dtype kept_dtype, double scale, Launch launch);
void absorb(void* grad, void* residual, void* momentum, double factor, Dtype dtype, int64_t count, Launch launch);
void triad(float* a, const float* b, const float* c, float s, int64_t count, Launch launch);

// union.cpp, union.cu: a bit for each `block` elements, as rules/union.h says. Values are of the arithmetic type: those
// of the union in order, `kept` of them; nothing goes beyond these, whatever the bits are. Without bits all are in it.
struct UnionMarked {
  const void* grad;
  int64_t count;
  uint64_t* bits;
};
struct UnionCounted {
  const uint64_t* bits;
  int64_t elements;
};
struct UnionEncoded {
  const void* grad;
  const uint64_t* bits;
  int64_t count, kept;
  void* values;
};
struct UnionDecoded {
  const void* values;
  const uint64_t* bits;
  int64_t count, kept;
  void* grad;
};
void union_mark(const UnionMarked* tensors, int64_t tensor_count, Dtype dtype, int64_t block, int64_t* nonfinite,
                Launch launch);
void union_count(const UnionCounted* tensors, int64_t tensor_count, int64_t block, int64_t* kept, Launch launch);
void union_encode(const UnionEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t block, Launch launch);
void union_decode(const UnionDecoded* tensors, int64_t tensor_count, Dtype dtype, int64_t block, double scale,
                  Launch launch);

// adam.cpp, adam.cu: tensors whose scales are the same; `second` is written; `square` and `floors`, one per row or
// null, are of the arithmetic type
struct AdamHeld {
  void* second;
  const void *first, *grad, *square, *floors;
  int64_t count, row_length;
};
void adam_hold(const AdamHeld* tensors, int64_t tensor_count, Dtype dtype, AdamScales<double> scales, Launch launch);

// The step itself: weights and first moments are written.
struct AdamStepped {
  void *weight, *first;
  const void *grad, *square, *floors;
  int64_t count, row_length;
};
void adam_step(const AdamStepped* tensors, int64_t tensor_count, Dtype dtype, AdamStep<double> step, Launch launch);

// sgd.cpp, sgd.cu: weights and their momentum buffers are written, which may be null
struct SgdStepped {
  void *weight, *buffer;
  const void* grad;
  int64_t count;
};
void sgd_step(const SgdStepped* tensors, int64_t tensor_count, Dtype dtype, SgdStep<double> step, Launch launch);

// norm.cpp, norm.cu: one norm per row: of the arithmetic type for kMaximum, else float64. Moments are the norms for
// kMaximum and for kPower2 in one pass.
struct NormOffered {
  const void* grad;
  int64_t count, row_length;
  void* norms;
};
struct MomentsOffered {
  const void* grad;
  int64_t count, row_length;
  void* largest;
  double* squares;
};
void norm_offer(const NormOffered* tensors, int64_t tensor_count, Dtype dtype, Power power, int64_t* nonfinite,
                Launch launch);
void moments_offer(const MomentsOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t* nonfinite, Launch launch);

// norm_sketch.cpp, norm_sketch.cu: writes 16 * places counters for each tensor, places being 8 or 16; `offset` is a
// multiple of 64.
struct NormSketched {
  const void* grad;
  int64_t count, offset;
  double* sums;
};
void norm_sketch(const NormSketched* tensors, int64_t tensor_count, Dtype dtype, int places, const Stream* key,
                 Launch launch);

// uniform.cpp, uniform.cu: codes of 2 to 8 or of 16 bits, packed (rows are whole bytes); levels < 2^(bits-1). |x|
// counts as the bound of its row at most, where there are bounds. Added in place they have 4, 8 or 16 bits. The fold
// adds the codes of all parts modulo 2^8, and writes the lowest sum_bits <= 8 of each sum; `out` is none of the parts.
void uniform_add(void* into, const void* other, int64_t count, int bits, Launch launch);
void uniform_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int bits, int sum_bits, uint8_t* out,
                  Launch launch);
struct UniformEncoded {
  const void *grad, *norms;
  int64_t count, row_length, offset;
  void* codes;
  const void* bounds;  // or null
};
struct UniformDecoded {
  const void *codes, *norms;
  int64_t count, row_length;
  void* grad;
};
void uniform_encode(const UniformEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits, int32_t levels,
                    const Stream* key, Launch launch);
void uniform_decode(const UniformDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits, double scale,
                    Launch launch);

// exponential.cpp, exponential.cu: codes of 4 bits (two to a byte, row_length even) or 8; 1 <= headroom < 2^(bits-1).
// Those of 8 have a mantissa of 0 or 2 bits; merging is for codes without one. The fold makes of the codes of all
// parts, 8 bits each, those of their mean; `out` may be one of the parts.
void exponential_merge(uint8_t* into, const uint8_t* other, int64_t bytes, int bits, const Stream* key, int64_t offset,
                       Launch launch);
void exponential_fold(const uint8_t* const* parts, int64_t part_count, int64_t count, int32_t headroom,
                      int32_t mantissa, const Stream* key, int64_t offset, uint8_t* out, Launch launch);
struct ExponentialEncoded {
  const void *grad, *norms;
  int64_t count, row_length, offset;
  uint8_t* codes;
};
struct ExponentialDecoded {
  const uint8_t* codes;
  const void* norms;
  int64_t count, row_length;
  void* grad;
};
void exponential_encode(const ExponentialEncoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, int32_t mantissa, const Stream* key, Launch launch);
void exponential_decode(const ExponentialDecoded* tensors, int64_t tensor_count, Dtype dtype, int bits,
                        int32_t headroom, int32_t mantissa, double scale, Launch launch);

// qsgd.cpp, qsgd.cu: one record for every block, as rules/qsgd.h says; `out` of a fold may be one of the parts
void qsgd_fold(const uint8_t* const* parts, int64_t part_count, int64_t blocks, QsgdShape shape, const Stream* key,
               int64_t offset, uint8_t* out, Launch launch);
struct QsgdEncoded {
  const void* grad;
  int64_t count, offset;
  uint8_t* records;
};
struct QsgdDecoded {
  const uint8_t* records;
  int64_t count;
  void* grad;
};
void qsgd_encode(const QsgdEncoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, const Stream* key,
                 int64_t* nonfinite, Launch launch);
void qsgd_decode(const QsgdDecoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, double scale,
                 Launch launch);

// loco.cpp, loco.cu: such records of gradients, and of means, with what was kept of earlier errors; what is kept of
// them now goes to `left`, in records of kept_bits, see rules/loco.h. Without `kept` those are zeros; `out` may be a
// part.
struct LocoEncoded {
  const void* grad;
  const uint8_t* kept;
  int64_t count;
  uint8_t *records, *left;
};
void loco_encode(const LocoEncoded* tensors, int64_t tensor_count, Dtype dtype, QsgdShape shape, int kept_bits,
                 double beta, int64_t* nonfinite, Launch launch);
void loco_fold(const uint8_t* const* parts, int64_t part_count, int64_t blocks, QsgdShape shape, int kept_bits,
               double beta, const uint8_t* kept, uint8_t* out, uint8_t* left, Launch launch);

// elias.cpp, elias.cu: the same codes in sections as rules/elias.h describes them. Encoding begins at
// place[0] of out, and writes where it ends to place[1], as binary_encode() does; decoding adds the sections in their
// order, `wrong` counts malformed ranges. With an `error` above 0 norms are those of WidestNorm, and there is no key.
void elias_encode(const void* grad, Dtype dtype, int64_t count, QsgdShape shape, double error, const Stream* key,
                  int64_t offset, int64_t* place, uint8_t* out, int64_t room, int64_t* nonfinite, Launch launch);
void elias_decode(const Section* sections, int64_t section_count, Dtype dtype, int64_t count, QsgdShape shape,
                  double scale, void* grad, int64_t* wrong, Launch launch);

// sketch.cpp, sketch.cu: a table has rows x (16 * places) cells, places prime, of float64 for kFloat64 and else of
// float32; `dtype` of a table is one of these two. Elements lie below 2^31, `offset` is a multiple of 16. Spans are
// ascending. sketch_top waits for its stream on CUDA.
struct Span {
  int64_t start, count;
};
void sketch_encode(const void* grad, const void* residual, const void* momentum, double factor, Dtype dtype,
                   int64_t count, int64_t offset, int rows, int64_t places, const Stream* key, void* table,
                   int64_t* nonfinite, Launch launch);
int64_t sketch_top(const void* table, Dtype dtype, int rows, int64_t places, const Stream* key, const Span* spans,
                   int64_t span_count, int64_t k, int64_t* positions, void* estimates, Launch launch);
void sketch_clear(void* table, Dtype dtype, int rows, int64_t places, const Stream* key, const int64_t* positions,
                  int64_t count, Launch launch);

// select.cpp, select.cu: count < 2^31, k <= count. The three numbers: how many were kept, how many elements are not
// finite, and 1 if a sample has misled, on CUDA. Then nothing else that was written counts, and it is to be repeated
// with `whole`.
constexpr int kSelected = 3;
struct TopSelected {
  const void *grad, *residual;
  int64_t count, k;
  int32_t* positions;
  void* values;
  int64_t* numbers;
};
struct BinarySelected {
  const void *grad, *residual;
  int64_t count, k;
  int32_t* positions;
  void* mean;
  int64_t* numbers;
};
void top_select(const TopSelected* tensors, int64_t tensor_count, Dtype dtype, bool whole, Launch launch);
void binary_select(const BinarySelected* tensors, int64_t tensor_count, Dtype dtype, bool whole, Launch launch);

// chunks.cpp, chunks.cu: the k largest of each chunk, as rules/chunks.h says, `last` of a shorter last one; the numbers
// are those of top_select
struct ChunkSelected {
  const void *grad, *residual;
  int64_t count, last;
  int32_t* positions;
  void* values;
  int64_t* numbers;
};
void chunk_select(const ChunkSelected* tensors, int64_t tensor_count, Dtype dtype, int64_t chunk, int64_t k,
                  Launch launch);

// golomb.cpp, golomb.cu: sections as rules/golomb.h describes them; `wrong` counts malformed ranges. Sections are
// written one after the other: of tensor i from ends[i] of out on, and where it ends to ends[i + 1]. That is -1 if the
// positions do not ascend below `elements`, if there is no room, or if ends[i] is such a -1 itself.
struct BinaryEncoded {
  const int32_t* positions;
  int64_t kept;
  const void* mean;
  int64_t elements, parameter;
};
void binary_encode(const BinaryEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t* ends, uint8_t* out,
                   int64_t room, Launch launch);
// Sections are as many of each tensor, `ranks`, those of the first tensor first.
struct BinaryDecoded {
  int64_t parameter, count;
  void *grad, *residual;
};
void binary_decode(const BinaryDecoded* tensors, int64_t tensor_count, Dtype dtype, const Section* sections,
                   int64_t ranks, int64_t own, double scale, int64_t* wrong, Launch launch);
void binary_clear(const Section* section, int parameter, Dtype dtype, int64_t count, void* tensor, int64_t* wrong,
                  Launch launch);

// codebook.cpp, codebook.cu: fits 2^(bits-1) levels as rules/codebook.h says
void codebook_fit(const void* values, Dtype dtype, int64_t count, int bits, float* levels, Launch launch);

// values.cpp, values.cu: sections as rules/values.h describes them; `wrong` counts malformed ranges. Encoding takes
// `ends` as binary_encode() does; `head` is the mean of kSigns, or the levels of codes. With momentum, which needs a
// residual and decay 1, what is kept is u = factor u + grad and residual = x + factor u; else decay (x - what was
// sent). By senders, a sum is divided by how many sections have the element.
struct ValuesEncoded {
  const int32_t* positions;
  int64_t kept;
  const void *values, *head;
  int64_t form, elements, parameter;
};
void values_encode(const ValuesEncoded* tensors, int64_t tensor_count, Dtype dtype, int64_t* ends, uint8_t* out,
                   int64_t room, Launch launch);
struct ValuesDecoded {
  int64_t form, parameter, count;
  void *grad, *residual, *momentum;
};
void values_decode(const ValuesDecoded* tensors, int64_t tensor_count, Dtype dtype, const Section* sections,
                   int64_t ranks, int64_t own, double scale, double factor, bool masking, double decay, bool by_senders,
                   int64_t* wrong, Launch launch);

// sample.cpp, sample.cu: one block of `block` neighbouring elements of each of k groups of them, as rules/sample.h
// says; draws `first` to `first` + k - 1 of the key decide which. Values are those of whole blocks: past the end of
// the tensor, zeros.
void sample_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t block, int64_t k,
                  const Stream* key, int64_t first, void* values, int64_t* nonfinite, Launch launch);
void sample_decode(const void* values, Dtype dtype, int64_t count, int64_t block, int64_t k, const Stream* key,
                   int64_t first, double scale, bool weighted, void* grad, void* residual, Launch launch);

// lowrank.cpp, lowrank.cu: sums as rules/lowrank.h describes them, for at least one row, column and component. Factors
// are of the arithmetic type, one line per component. lowrank_start brings the lines of `kept` to a common size, and
// draws those that are zero or not finite: numbers `offset` and on of the key.
void lowrank_start(const void* kept, Dtype dtype, int64_t columns, int64_t rank, const Stream* key, int64_t offset,
                   void* right, Launch launch);
void lowrank_left(const void* grad, const void* residual, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                  const void* right, void* left, int64_t* nonfinite, Launch launch);
void lowrank_orthonormalise(void* lines, Dtype dtype, int64_t count, int64_t rank, Launch launch);
void lowrank_right(const void* grad, const void* residual, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                   const void* left, void* right, Launch launch);
void lowrank_decode(const void* left, const void* right, Dtype dtype, int64_t rows, int64_t columns, int64_t rank,
                    double scale, void* grad, void* residual, Launch launch);

// records.cpp, records.cu: records as rules/record.h describes them. The fold writes the record of the mean of what all
// ranks sent plus `kept`, over one of the parts if it is given as `out`, and what that record lacks to `left`; both are
// of the arithmetic type. Decoding takes what the own scales and the signs of grad + residual stand for out of the
// residual.
void record_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t block, ScaleRule rule,
                  uint8_t* records, int64_t* nonfinite, Launch launch);
void record_fold(const uint8_t* const* parts, int64_t ranks, Dtype dtype, int64_t count, int64_t block, ScaleRule rule,
                 const void* kept, void* left, uint8_t* out, Launch launch);
void record_decode(const uint8_t* records, const float* scales, Dtype dtype, int64_t count, int64_t block, double scale,
                   void* grad, void* residual, Launch launch);

// hash64.cpp, hash64.cu: waits for its stream on CUDA
uint64_t hash64(const void* data, int64_t bytes, uint64_t seed, Launch launch);

// crc32c.cpp: host memory only
uint32_t crc32c(const void* data, int64_t bytes, uint32_t crc);
uint32_t crc32c_copy(void* into, const void* from, int64_t bytes, uint32_t crc);

// isa.cpp: what runtime dispatch chose
const char* instruction_set();

}  // namespace hvc

// What Python may call: `use` is given each by its name.
// clang-format off
#define HVC_EACH_KERNEL(use) \
  use(sign_pack) use(sign_offer) use(sign_decode) use(two_value_offer) use(two_value_decode) use(merge_bits) \
  use(bernoulli_words) use(majority_fold) use(shaped_merge) use(shaped_fold) use(ternary_fold) use(ternary_unpack) \
  use(record_offer) use(record_fold) use(record_decode) use(dense_offer) use(dense_add) use(dense_decode) \
  use(absorb) use(triad) use(union_mark) use(union_count) use(union_encode) use(union_decode) \
  use(adam_hold) use(adam_step) use(sgd_step) use(norm_offer) use(moments_offer) use(norm_sketch) \
  use(uniform_encode) use(uniform_add) use(uniform_fold) use(uniform_decode) \
  use(exponential_encode) use(exponential_merge) use(exponential_fold) use(exponential_decode) \
  use(qsgd_encode) use(qsgd_fold) use(qsgd_decode) use(loco_encode) use(loco_fold) use(elias_encode) use(elias_decode) \
  use(sketch_encode) use(sketch_top) use(sketch_clear) use(top_select) \
  use(binary_select) use(binary_encode) use(binary_decode) use(binary_clear) \
  use(chunk_select) use(codebook_fit) use(values_encode) use(values_decode) use(sample_offer) use(sample_decode) \
  use(lowrank_start) use(lowrank_left) use(lowrank_orthonormalise) use(lowrank_right) use(lowrank_decode) \
  use(hash64)
// clang-format on
