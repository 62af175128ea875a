// A warp reads a Golomb stream: what GolombReader finds, in pieces of 2,048 bits.
//
// Where a code begins is known only when all before it have been read. So each lane takes 64 bits of a piece, and notes
// for every bit where the codes would go on behind these 64 if one of them began there: from the last bit to the first
// one that is a step for each. Then 32 steps from lane to lane say where each really begins, and all lanes read on.
#pragma once
#include "rules/golomb.h"
#include "scan.h"

namespace hvc {
namespace {

constexpr int kLaneBits = 64, kPieceBits = kWarp * kLaneBits;

// A stream, and the elements of its range.
struct CodedRange {
  const uint8_t* stream;
  int64_t bytes;
  int parameter;
  int64_t begin, end;
};

// What a warp has in shared memory.
struct Piece {
  uint64_t words[kWarp + 2];
  uint16_t exits[kLaneBits][kWarp];
};

// Eight bytes of a stream from any place on, ones past its end. Only words that hold bytes of the stream are read.
__device__ inline uint64_t stream_word(const uint8_t* stream, int64_t bytes, int64_t at) {
  if (at + 8 <= bytes) return load_bytes<uint64_t>(stream + at);
  uint64_t word = ~uint64_t(0);
  for (int64_t i = at; i < bytes; ++i) word ^= uint64_t(0xff ^ stream[i]) << (8 * (i - at));
  return word;
}

// The codes of a piece. Bits count from its beginning.
class PieceReader {
 public:
  __device__ PieceReader(Piece& piece, int parameter) : piece_(piece), parameter_(parameter) {}

  // `valid` bits are of the stream, the rest are ones.
  __device__ void load(uint64_t word, int valid) {
    word_ = word;
    valid_ = valid;
    const uint64_t later = uint64_t(__ballot_sync(kAllLanes, word != ~uint64_t(0))) >> lane_index() >> 1;
    const int steps = later == 0 ? 0 : 1 + trailing_ones(~later);
    const int zero = __shfl_sync(kAllLanes, first_bit() + trailing_ones(word), lane_index() + steps);
    zero_after_ = later == 0 ? kNowhere : zero;
    __syncwarp();
    piece_.words[lane_index()] = word;
    if (lane_index() < 2) piece_.words[kWarp + lane_index()] = ~uint64_t(0);
    if (parameter_ >= 3)
      note_exits<4>();
    else
      note_exits<1>();
    __syncwarp();
  }

  // Goes from code to code from a bit on: up to the end of the piece, or to the first code that does not end in it.
  __device__ int walk(int bit) {
    begin_ = kNowhere;
    while (bit < kPieceBits) {
      const int lane = bit / kLaneBits, exit = piece_.exits[bit % kLaneBits][lane];
      if (lane == lane_index()) begin_ = bit;
      if (exit >= kStuck) return exit - kStuck;
      bit = exit;
    }
    return bit;
  }

  // Whether all bits from one on are ones.
  __device__ bool only_ones(int bit) const {
    const uint64_t mine = bit <= first_bit()              ? word_
                          : bit - first_bit() < kLaneBits ? word_ | below(bit)
                                                          : ~uint64_t(0);
    return __ballot_sync(kAllLanes, mine != ~uint64_t(0)) == 0;
  }

  // Calls use(gap) for the codes that begin in the lane's bits, until it returns false.
  template <class Use> __device__ void each_gap(const Use& use) const {
    for (int bit = begin_; bit < first_bit() + kLaneBits;) {
      const uint64_t rest = word_ >> (bit % kLaneBits) | ~(~uint64_t(0) >> (bit % kLaneBits));
      const int ones = trailing_ones(rest), zero = ones < kLaneBits ? bit + ones : zero_after_;
      const int next = zero + 1 + parameter_;
      if (next > valid_ || !use(int64_t(zero - bit) << parameter_ | low_bits(zero + 1))) return;
      bit = next;
    }
  }

 private:
  static constexpr int kNowhere = 1 << 14, kStuck = 1 << 15;

  __device__ static int first_bit() { return kLaneBits * lane_index(); }
  __device__ static uint64_t below(int bit) { return (uint64_t(1) << (bit % kLaneBits)) - 1; }

  __device__ int64_t low_bits(int bit) const {
    const uint64_t *words = piece_.words + bit / kLaneBits, mask = (uint64_t(1) << parameter_) - 1;
    const int shift = bit % kLaneBits;
    return int64_t((words[0] >> shift | words[1] << 1 << (kLaneBits - 1 - shift)) & mask);
  }

  // exits: where the codes go on behind the lane's bits if one began at this bit; or where that stops, marked. A code
  // has more bits than the parameter says: so many neighbours do not wait for each other.
  template <int kTogether> __device__ void note_exits() {
    const int first = first_bit(), lane = lane_index();
    uint64_t left = word_;
    int next = zero_after_ + 1 + parameter_;
    for (int bit = kLaneBits - 1; bit >= 0; bit -= kTogether) {
      int exits[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k, left <<= 1) {
        if (left >> (kLaneBits - 1) == 0) next = first + bit - k + 1 + parameter_;
        const int inside = piece_.exits[min(next - first, kLaneBits - 1)][lane];
        exits[k] = next < first + kLaneBits ? inside : next;
        if (next > valid_) exits[k] = kStuck + first + bit - k;
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) piece_.exits[bit - k][lane] = uint16_t(exits[k]);
    }
  }

  Piece& piece_;
  int parameter_;
  uint64_t word_ = 0;
  int valid_ = 0, zero_after_ = 0, begin_ = 0;
};

// What was found in a range: the positions that count, and whether it is malformed.
struct Read {
  int64_t number;
  bool malformed;
};

// Calls use(index, position) for all positions of a range, by any lane; all lanes of a warp call this.
template <class Use> __device__ Read each_position(Piece& piece, const CodedRange& range, const Use& use) {
  constexpr int kCarried = kPieceBits / 2;
  PieceReader reader(piece, range.parameter);
  const int64_t bits = 8 * range.bytes;
  int64_t number = 0, next = range.begin;
  bool in_code = false;  // ones of the next code have been read
  for (int64_t at = 0;;) {
    const int64_t byte = at / 8;
    const int first = int(at % 8);
    reader.load(stream_word(range.stream, range.bytes, byte + 8 * lane_index()),
                int(min(bits - 8 * byte, int64_t(kPieceBits))));
    const int stop = reader.walk(first);
    int codes = 0, all_codes;
    int64_t elements = 0, all_elements;
    reader.each_gap([&](int64_t gap) { return ++codes, elements += gap + 1, true; });
    int64_t index = number + sum_before(codes, all_codes), position = next + sum_before(elements, all_elements);
    bool outside = false;
    reader.each_gap([&](int64_t gap) {
      position += gap;
      outside = position >= range.end;
      if (!outside) use(index++, position++);
      return !outside;
    });
    const unsigned lanes_outside = __ballot_sync(kAllLanes, outside);
    if (lanes_outside != 0) return {__shfl_sync(kAllLanes, index, trailing_ones(~uint64_t(lanes_outside))), true};
    number += all_codes;
    next += all_elements;
    in_code = in_code && all_codes == 0;
    at = 8 * byte + stop;
    if (8 * byte + kPieceBits >= bits) return {number, in_code || bits - at >= 8 || !reader.only_ones(stop)};
    if (stop > first) continue;
    // A code longer than a piece: half of it is in the unary part.
    at += kCarried;
    next += int64_t(kCarried) << range.parameter;
    in_code = true;
    if (next >= range.end) return {number, true};
  }
}

}  // namespace
}  // namespace hvc
