# The kernels for CPUs, as csrc/bind.h binds them. Written by tools/make_stubs.py from csrc/kernels.h.
#
# Memory is given by address, 0 for none; dtypes and rules by their number in csrc/kernels.h; keys by their five words.
# ``launch`` is the number of threads. Counts go to the memory that is given, and 0 has them returned.
# ``rows`` has the addresses and numbers of one tensor each, in the order of the members in csrc/kernels.h.

from collections.abc import Sequence
from typing import TypeAlias

_Key: TypeAlias = Sequence[int] | None
_Rows: TypeAlias = Sequence[Sequence[int]]
_Shape: TypeAlias = tuple[int, int, int]  # bits, block, norm
_Scales: TypeAlias = Sequence[float]

def sign_pack(x: int, dtype: int, count: int, bits: int, launch: int, /) -> None: ...
def sign_offer(
    rows: _Rows, dtype: int, kept_dtype: int, ranks: int, scale: float, key: _Key, nonfinite: int, launch: int, /
) -> list[int]: ...
def sign_decode(
    rows: _Rows,
    dtype: int,
    kept_dtype: int,
    feedback: int,
    decay: float,
    scale: float,
    key: _Key,
    rounding: _Key,
    launch: int,
    /,
) -> None: ...
def two_value_offer(rows: _Rows, dtype: int, kept_dtype: int, nonfinite: int, launch: int, /) -> list[int]: ...
def two_value_decode(
    rows: _Rows,
    dtype: int,
    kept_dtype: int,
    bits: Sequence[int],
    highs: Sequence[int],
    lows: Sequence[int],
    ranks: int,
    own: int,
    scale: float,
    rounding: _Key,
    launch: int,
    /,
) -> None: ...
def merge_bits(
    into: int, other: int, words: int, numerator: int, denominator: int, key: _Key, word_offset: int, launch: int, /
) -> None: ...
def bernoulli_words(
    out: int, words: int, numerator: int, denominator: int, key: _Key, word_offset: int, launch: int, /
) -> None: ...
def shaped_merge(
    into: int, other: int, words: int, ranks: int, before: Sequence[int], after: Sequence[int], launch: int, /
) -> None: ...
def shaped_fold(
    parts: Sequence[int], ranks: int, words: int, out: int, before: Sequence[int], after: Sequence[int], launch: int, /
) -> None: ...
def ternary_fold(
    parts: Sequence[int], ranks: int, words: int, out: int, before: Sequence[int], after: Sequence[int], launch: int, /
) -> None: ...
def ternary_unpack(packed: int, words: int, bits: int, zeros: int, launch: int, /) -> None: ...
def majority_fold(parts: Sequence[int], part_count: int, count: int, out: int, launch: int, /) -> None: ...
def dense_add(into: int, other: int, dtype: int, count: int, launch: int, /) -> None: ...
def dense_offer(
    rows: _Rows, dtype: int, kept_dtype: int, out_dtype: int, nonfinite: int, launch: int, /
) -> list[int]: ...
def dense_decode(
    rows: _Rows, payload_dtype: int, grad_dtype: int, kept_dtype: int, scale: float, launch: int, /
) -> None: ...
def absorb(grad: int, residual: int, momentum: int, factor: float, dtype: int, count: int, launch: int, /) -> None: ...
def triad(a: int, b: int, c: int, s: float, count: int, launch: int, /) -> None: ...
def union_mark(rows: _Rows, dtype: int, block: int, nonfinite: int, launch: int, /) -> list[int]: ...
def union_count(rows: _Rows, block: int, kept: int, launch: int, /) -> list[int]: ...
def union_encode(rows: _Rows, dtype: int, block: int, launch: int, /) -> None: ...
def union_decode(rows: _Rows, dtype: int, block: int, scale: float, launch: int, /) -> None: ...
def adam_hold(rows: _Rows, dtype: int, scales: _Scales, launch: int, /) -> None: ...
def adam_step(rows: _Rows, dtype: int, step: _Scales, launch: int, /) -> None: ...
def sgd_step(rows: _Rows, dtype: int, step: _Scales, launch: int, /) -> None: ...
def norm_offer(rows: _Rows, dtype: int, power: int, nonfinite: int, launch: int, /) -> list[int]: ...
def moments_offer(rows: _Rows, dtype: int, nonfinite: int, launch: int, /) -> list[int]: ...
def norm_sketch(rows: _Rows, dtype: int, places: int, key: _Key, launch: int, /) -> None: ...
def uniform_add(into: int, other: int, count: int, bits: int, launch: int, /) -> None: ...
def uniform_fold(
    parts: Sequence[int], part_count: int, count: int, bits: int, sum_bits: int, out: int, launch: int, /
) -> None: ...
def uniform_encode(rows: _Rows, dtype: int, bits: int, levels: int, key: _Key, launch: int, /) -> None: ...
def uniform_decode(rows: _Rows, dtype: int, bits: int, scale: float, launch: int, /) -> None: ...
def exponential_merge(
    into: int, other: int, bytes_: int, bits: int, key: _Key, offset: int, launch: int, /
) -> None: ...
def exponential_fold(
    parts: Sequence[int],
    part_count: int,
    count: int,
    headroom: int,
    mantissa: int,
    key: _Key,
    offset: int,
    out: int,
    launch: int,
    /,
) -> None: ...
def exponential_encode(
    rows: _Rows, dtype: int, bits: int, headroom: int, mantissa: int, key: _Key, launch: int, /
) -> None: ...
def exponential_decode(
    rows: _Rows, dtype: int, bits: int, headroom: int, mantissa: int, scale: float, launch: int, /
) -> None: ...
def qsgd_fold(
    parts: Sequence[int], part_count: int, blocks: int, shape: _Shape, key: _Key, offset: int, out: int, launch: int, /
) -> None: ...
def qsgd_encode(rows: _Rows, dtype: int, shape: _Shape, key: _Key, nonfinite: int, launch: int, /) -> list[int]: ...
def qsgd_decode(rows: _Rows, dtype: int, shape: _Shape, scale: float, launch: int, /) -> None: ...
def loco_encode(
    rows: _Rows, dtype: int, shape: _Shape, kept_bits: int, beta: float, nonfinite: int, launch: int, /
) -> list[int]: ...
def loco_fold(
    parts: Sequence[int],
    part_count: int,
    blocks: int,
    shape: _Shape,
    kept_bits: int,
    beta: float,
    kept: int,
    out: int,
    left: int,
    launch: int,
    /,
) -> None: ...
def elias_encode(
    grad: int,
    dtype: int,
    count: int,
    shape: _Shape,
    error: float,
    key: _Key,
    offset: int,
    place: int,
    out: int,
    room: int,
    nonfinite: int,
    launch: int,
    /,
) -> int: ...
def elias_decode(
    sections: _Rows,
    section_count: int,
    dtype: int,
    count: int,
    shape: _Shape,
    scale: float,
    grad: int,
    wrong: int,
    launch: int,
    /,
) -> int: ...
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
    key: _Key,
    table: int,
    nonfinite: int,
    launch: int,
    /,
) -> int: ...
def sketch_top(
    table: int,
    dtype: int,
    rows: int,
    places: int,
    key: _Key,
    spans: _Rows,
    span_count: int,
    k: int,
    positions: int,
    estimates: int,
    launch: int,
    /,
) -> int: ...
def sketch_clear(
    table: int, dtype: int, rows: int, places: int, key: _Key, positions: int, count: int, launch: int, /
) -> None: ...
def top_select(rows: _Rows, dtype: int, whole: bool, launch: int, /) -> None: ...
def binary_select(rows: _Rows, dtype: int, whole: bool, launch: int, /) -> None: ...
def chunk_select(rows: _Rows, dtype: int, chunk: int, k: int, launch: int, /) -> None: ...
def binary_encode(rows: _Rows, dtype: int, ends: int, out: int, room: int, launch: int, /) -> None: ...
def binary_decode(
    rows: _Rows, dtype: int, sections: _Rows, ranks: int, own: int, scale: float, wrong: int, launch: int, /
) -> list[int]: ...
def binary_clear(
    section: _Rows, parameter: int, dtype: int, count: int, tensor: int, wrong: int, launch: int, /
) -> int: ...
def codebook_fit(values: int, dtype: int, count: int, bits: int, levels: int, launch: int, /) -> None: ...
def values_encode(rows: _Rows, dtype: int, ends: int, out: int, room: int, launch: int, /) -> None: ...
def values_decode(
    rows: _Rows,
    dtype: int,
    sections: _Rows,
    ranks: int,
    own: int,
    scale: float,
    factor: float,
    masking: bool,
    decay: float,
    by_senders: bool,
    wrong: int,
    launch: int,
    /,
) -> list[int]: ...
def sample_offer(
    grad: int,
    residual: int,
    dtype: int,
    count: int,
    block: int,
    k: int,
    key: _Key,
    first: int,
    values: int,
    nonfinite: int,
    launch: int,
    /,
) -> int: ...
def sample_decode(
    values: int,
    dtype: int,
    count: int,
    block: int,
    k: int,
    key: _Key,
    first: int,
    scale: float,
    weighted: bool,
    grad: int,
    residual: int,
    launch: int,
    /,
) -> None: ...
def lowrank_start(
    kept: int, dtype: int, columns: int, rank: int, key: _Key, offset: int, right: int, launch: int, /
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
    nonfinite: int,
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
def record_offer(
    grad: int,
    residual: int,
    dtype: int,
    count: int,
    block: int,
    rule: int,
    records: int,
    nonfinite: int,
    launch: int,
    /,
) -> int: ...
def record_fold(
    parts: Sequence[int],
    ranks: int,
    dtype: int,
    count: int,
    block: int,
    rule: int,
    kept: int,
    left: int,
    out: int,
    launch: int,
    /,
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
def hash64(data: int, bytes_: int, seed: int, launch: int, /) -> int: ...
def crc32c(data: int, bytes_: int, crc: int, /) -> int: ...
def crc32c_copy(into: int, from_: int, bytes_: int, crc: int, /) -> int: ...
def instruction_set() -> str: ...
def philox4x32(counter: Sequence[int], key: Sequence[int], /) -> list[int]: ...
