# The kernels for CPUs, as csrc/bind.h and csrc/bind_cpu.cpp bind them.
#
# Memory is given by address, 0 for none; dtypes and rules by their number in csrc/kernels.h; keys by their five words.
# ``launch`` is the number of threads. ``counter`` is the memory that receives a count, and 0 has it returned.
# ``rows`` has the addresses and numbers of one tensor each, in the order of the members in csrc/kernels.h.

from collections.abc import Sequence
from typing import TypeAlias

_Words: TypeAlias = tuple[int, int, int, int, int]
_Rows: TypeAlias = Sequence[Sequence[int]]
_Sections: TypeAlias = Sequence[tuple[int, int]]  # address and bytes of each rank's payload

# ---- signs, full precision, levels and octaves ----

def sign_pack(x: int, dtype: int, count: int, bits: int, launch: int, /) -> None: ...
def sign_offer(
    grad: int,
    residual: int,
    dtype: int,
    count: int,
    row_length: int,
    key: _Words | None,
    word_offset: int,
    bits: int,
    sums: int,
    counter: int,
    launch: int,
    /,
) -> int: ...
def sign_decode(
    bits: int,
    steps: int,
    dtype: int,
    count: int,
    row_length: int,
    feedback: int,
    decay: float,
    scale: float,
    key: _Words | None,
    word_offset: int,
    grad: int,
    residual: int,
    launch: int,
    /,
) -> None: ...
def sign_offer_all(rows: _Rows, dtype: int, ranks: int, key: _Words | None, counters: int, launch: int, /) -> None: ...
def sign_decode_all(
    rows: _Rows, dtype: int, feedback: int, decay: float, scale: float, key: _Words | None, launch: int, /
) -> None: ...
def sign_unpack(
    bits: int, steps: int, dtype: int, count: int, row_length: int, scale: float, out: int, launch: int, /
) -> None: ...
def merge_bits(
    into: int, other: int, words: int, numerator: int, denominator: int, key: _Words, word_offset: int, launch: int, /
) -> None: ...
def bernoulli_words(
    out: int, words: int, numerator: int, denominator: int, key: _Words, word_offset: int, launch: int, /
) -> None: ...
def majority_fold(parts: Sequence[int], count: int, out: int, launch: int, /) -> None: ...
def shaped_merge(
    into: int, other: int, words: int, ranks: int, before: Sequence[int], after: Sequence[int], launch: int, /
) -> None: ...
def shaped_fold(
    parts: Sequence[int], words: int, out: int, before: Sequence[int], after: Sequence[int], launch: int, /
) -> None: ...
def ternary_fold(
    parts: Sequence[int], words: int, out: int, before: Sequence[int], after: Sequence[int], launch: int, /
) -> None: ...
def ternary_unpack(packed: int, words: int, bits: int, zeros: int, launch: int, /) -> None: ...
def adam_hold_all(
    rows: _Rows, dtype: int, share: float, least: float, wanted: float, coming: float, taken: float, launch: int, /
) -> None: ...
def dense_offer(
    grad: int, residual: int, dtype: int, count: int, out: int, out_dtype: int, counter: int, launch: int, /
) -> int: ...
def dense_add(into: int, other: int, dtype: int, count: int, launch: int, /) -> None: ...
def dense_decode(
    payload: int,
    payload_dtype: int,
    count: int,
    scale: float,
    grad: int,
    grad_dtype: int,
    residual: int,
    launch: int,
    /,
) -> None: ...
def dense_offer_all(rows: _Rows, dtype: int, out_dtype: int, counters: int, launch: int, /) -> None: ...
def dense_decode_all(rows: _Rows, payload_dtype: int, scale: float, grad_dtype: int, launch: int, /) -> None: ...
def norm_offer(
    grad: int, dtype: int, count: int, row_length: int, power: int, norms: int, counter: int, launch: int, /
) -> int: ...
def level_encode(
    grad: int,
    norms: int,
    bounds: int,
    dtype: int,
    count: int,
    row_length: int,
    bits: int,
    levels: int,
    key: _Words,
    offset: int,
    codes: int,
    launch: int,
    /,
) -> None: ...
def level_add(into: int, other: int, count: int, bits: int, launch: int, /) -> None: ...
def level_decode(
    codes: int, norms: int, count: int, row_length: int, bits: int, scale: float, grad: int, dtype: int, launch: int, /
) -> None: ...
def octave_encode(
    grad: int,
    norms: int,
    dtype: int,
    count: int,
    row_length: int,
    bits: int,
    headroom: int,
    key: _Words,
    offset: int,
    codes: int,
    launch: int,
    /,
) -> None: ...
def octave_merge(into: int, other: int, nbytes: int, bits: int, key: _Words, offset: int, launch: int, /) -> None: ...
def octave_decode(
    codes: int,
    norms: int,
    count: int,
    row_length: int,
    bits: int,
    headroom: int,
    scale: float,
    grad: int,
    dtype: int,
    launch: int,
    /,
) -> None: ...
def triad(a: int, b: int, c: int, s: float, count: int, launch: int, /) -> None: ...
def hash64(data: int, nbytes: int, seed: int, launch: int, /) -> int: ...

# ---- signs with two values ----

def points_offer(
    grad: int,
    residual: int,
    dtype: int,
    count: int,
    row_length: int,
    bits: int,
    highs: int,
    lows: int,
    ones: int,
    counter: int,
    launch: int,
    /,
) -> int: ...
def points_decode(
    bits: Sequence[int],
    highs: Sequence[int],
    lows: Sequence[int],
    own: int,
    dtype: int,
    count: int,
    row_length: int,
    scale: float,
    grad: int,
    residual: int,
    launch: int,
    /,
) -> None: ...
def points_offer_all(rows: _Rows, dtype: int, counters: int, launch: int, /) -> None: ...
def points_decode_all(
    rows: _Rows,
    bits: Sequence[int],
    highs: Sequence[int],
    lows: Sequence[int],
    own: int,
    dtype: int,
    scale: float,
    launch: int,
    /,
) -> None: ...

# ---- signs with a scale for each block ----

def record_offer(
    grad: int, residual: int, dtype: int, count: int, block: int, rule: int, records: int, counter: int, launch: int, /
) -> int: ...
def record_fold(
    parts: Sequence[int], dtype: int, count: int, block: int, rule: int, kept: int, left: int, out: int, launch: int, /
) -> None: ...
def record_decode(
    records: int,
    scales: int,
    dtype: int,
    count: int,
    block: int,
    scale: float,
    grad: int,
    residual: int,
    launch: int,
    /,
) -> None: ...

# ---- factors of low rank ----

def lowrank_start(
    kept: int, dtype: int, columns: int, rank: int, key: _Words, offset: int, right: int, launch: int, /
) -> None: ...
def lowrank_left(
    grad: int,
    residual: int,
    dtype: int,
    rows: int,
    columns: int,
    rank: int,
    right: int,
    left: int,
    counter: int,
    launch: int,
    /,
) -> int: ...
def lowrank_orthonormalise(lines: int, dtype: int, count: int, rank: int, launch: int, /) -> None: ...
def lowrank_right(
    grad: int, residual: int, dtype: int, rows: int, columns: int, rank: int, left: int, right: int, launch: int, /
) -> None: ...
def lowrank_decode(
    left: int,
    right: int,
    dtype: int,
    rows: int,
    columns: int,
    rank: int,
    scale: float,
    grad: int,
    residual: int,
    launch: int,
    /,
) -> None: ...

# ---- quantising on scales of their own ----

def moments_offer(
    grad: int, dtype: int, count: int, row_length: int, largest: int, squares: int, counter: int, launch: int, /
) -> int: ...
def octave_fold(
    parts: Sequence[int], count: int, headroom: int, key: _Words, offset: int, out: int, launch: int, /
) -> None: ...
def qsgd_encode(
    grad: int,
    dtype: int,
    count: int,
    bits: int,
    block: int,
    power: int,
    key: _Words,
    offset: int,
    records: int,
    counter: int,
    launch: int,
    /,
) -> int: ...
def qsgd_fold(
    parts: Sequence[int],
    blocks: int,
    bits: int,
    block: int,
    power: int,
    key: _Words,
    offset: int,
    out: int,
    launch: int,
    /,
) -> None: ...
def qsgd_decode(
    records: int, dtype: int, count: int, bits: int, block: int, scale: float, grad: int, launch: int, /
) -> None: ...
def norm_offer_all(rows: _Rows, dtype: int, power: int, counters: int, launch: int, /) -> None: ...
def moments_offer_all(rows: _Rows, dtype: int, counters: int, launch: int, /) -> None: ...
def level_encode_all(rows: _Rows, dtype: int, bits: int, levels: int, key: _Words, launch: int, /) -> None: ...
def level_decode_all(rows: _Rows, bits: int, scale: float, dtype: int, launch: int, /) -> None: ...
def octave_encode_all(rows: _Rows, dtype: int, bits: int, headroom: int, key: _Words, launch: int, /) -> None: ...
def octave_decode_all(rows: _Rows, bits: int, headroom: int, scale: float, dtype: int, launch: int, /) -> None: ...
def qsgd_encode_all(
    rows: _Rows, dtype: int, bits: int, block: int, power: int, key: _Words, counters: int, launch: int, /
) -> None: ...
def qsgd_decode_all(rows: _Rows, dtype: int, bits: int, block: int, scale: float, launch: int, /) -> None: ...

# ---- Elias codes ----

def elias_encode(
    grad: int,
    dtype: int,
    count: int,
    bits: int,
    block: int,
    power: int,
    key: _Words,
    offset: int,
    out: int,
    launch: int,
    /,
) -> tuple[int, int]: ...
def elias_decode(
    sections: _Sections,
    dtype: int,
    count: int,
    bits: int,
    block: int,
    scale: float,
    grad: int,
    counter: int,
    launch: int,
    /,
) -> int: ...

# ---- count sketch ----

def sketch_encode(
    grad: int,
    residual: int,
    momentum: int,
    factor: float,
    dtype: int,
    count: int,
    offset: int,
    rows: int,
    places: int,
    key: _Words,
    table: int,
    counter: int,
    launch: int,
    /,
) -> int: ...
def sketch_top(
    table: int,
    dtype: int,
    rows: int,
    places: int,
    key: _Words,
    spans: Sequence[int],
    k: int,
    positions: int,
    estimates: int,
    launch: int,
    /,
) -> int: ...
def sketch_estimate(
    table: int,
    dtype: int,
    rows: int,
    places: int,
    key: _Words,
    positions: int,
    count: int,
    estimates: int,
    launch: int,
    /,
) -> None: ...
def sketch_clear(
    table: int, dtype: int, rows: int, places: int, key: _Words, positions: int, count: int, launch: int, /
) -> None: ...
def absorb(grad: int, residual: int, momentum: int, factor: float, dtype: int, count: int, launch: int, /) -> None: ...

# ---- positions ----

def top_select(
    grad: int, residual: int, dtype: int, count: int, k: int, positions: int, values: int, launch: int, /
) -> tuple[int, int]: ...
def binary_select(
    grad: int, residual: int, dtype: int, count: int, k: int, positions: int, mean: int, launch: int, /
) -> tuple[int, int]: ...
def binary_encode(
    positions: int, kept: int, mean: int, value_bytes: int, count: int, parameter: int, out: int, launch: int, /
) -> int: ...
def binary_decode(
    sections: _Sections,
    own: int,
    parameter: int,
    dtype: int,
    count: int,
    scale: float,
    grad: int,
    residual: int,
    counter: int,
    launch: int,
    /,
) -> int: ...
def binary_clear(
    data: int, nbytes: int, parameter: int, dtype: int, count: int, tensor: int, counter: int, launch: int, /
) -> int: ...

# ---- positions with values, and samples ----

def values_encode(
    positions: int,
    kept: int,
    values: int,
    mean: int,
    dtype: int,
    form: int,
    count: int,
    parameter: int,
    out: int,
    launch: int,
    /,
) -> int: ...
def values_decode(
    sections: _Sections,
    own: int,
    form: int,
    parameter: int,
    dtype: int,
    count: int,
    scale: float,
    grad: int,
    residual: int,
    momentum: int,
    factor: float,
    masking: bool,
    counter: int,
    launch: int,
    /,
) -> int: ...
def sample_offer(
    grad: int,
    residual: int,
    dtype: int,
    count: int,
    k: int,
    key: _Words,
    first: int,
    values: int,
    counter: int,
    launch: int,
    /,
) -> int: ...
def sample_decode(
    values: int,
    dtype: int,
    count: int,
    k: int,
    key: _Words,
    first: int,
    scale: float,
    weighted: bool,
    grad: int,
    residual: int,
    launch: int,
    /,
) -> None: ...

# ---- only on the CPU ----

def crc32c(data: int, nbytes: int, crc: int, /) -> int: ...
def crc32c_copy(into: int, source: int, nbytes: int, crc: int, /) -> int: ...
def philox4x32(counter: Sequence[int], key: Sequence[int], /) -> list[int]: ...
def instruction_set() -> str: ...
