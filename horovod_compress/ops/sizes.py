"""How many elements arrays have, and which numbers decide that: the shapes of payloads.

What differs between methods is in the headers of csrc/rules: records, sections, tables, factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .legality import MAX_DRAWS, MAX_PARTS, check_one_of, row_count, wide

__all__ = [
    "GROUP_WORDS",
    "PACKED_WORDS",
    "RECORD_UNIT",
    "code_layout",
    "count_rows",
    "elias_bound",
    "golomb_bound",
    "golomb_parameter",
    "least_error",
    "qsgd_record_bytes",
    "record_bytes",
    "sketch_columns",
    "values_bound",
]

# ---- signs --------------------------------------------------------------------------------------

#: Words of a group, and of what its three-valued elements are packed in.
GROUP_WORDS, PACKED_WORDS = 5, 8
#: Blocks are multiples of this many elements, so that records are whole 32-bit words.
RECORD_UNIT = 64


def count_rows(ranks: int) -> int:
    """Return how many rows the counts of a merge for that many ranks take."""
    if not 1 <= ranks <= MAX_PARTS:
        raise ValueError(f"ranks must be in [1, {MAX_PARTS}], got {ranks}")
    return (ranks - 1).bit_length()


def kept_rows(name: str, rows: Sequence[Tensor], states: int) -> Sequence[Tensor]:
    """Return the rows that counts below a number need."""
    needed = count_rows(states)
    if len(rows) < needed:
        raise ValueError(f"{name} must hold {needed} rows for counts below {states}, got {len(rows)}")
    return rows[:needed]


def ternary_states(ranks: int) -> int:
    """Return how many values the remainder of a fold to three values over this many ranks can take."""
    if not 2 <= ranks <= MAX_PARTS:
        raise ValueError(f"ranks must be in [2, {MAX_PARTS}], got {ranks}")
    return ranks if ranks % 2 else ranks // 2 + (ranks % 4 == 0)


def unpacked_words(packed: int) -> int:
    """Return how many words of bits some words of three-valued elements are."""
    groups, rest = divmod(packed, PACKED_WORDS)
    if rest:
        raise ValueError(f"three-valued elements take a multiple of {PACKED_WORDS} words, got {packed}")
    return groups * GROUP_WORDS


def check_inside(what: str, first: int, number: int, size: int) -> None:
    """Refuse a tensor whose words or rows are not all among those of its bucket."""
    if first < 0 or first + number > size:
        raise ValueError(f"a tensor's {what} must lie within the {size} of the bucket, got {first} + {number}")


def record_bytes(block: int) -> int:
    """Return the bytes of one record of a scale and signs."""
    if block < RECORD_UNIT or block % RECORD_UNIT:
        raise ValueError(f"block must be a multiple of {RECORD_UNIT}, got {block}")
    return 4 + block // 8


# ---- codes --------------------------------------------------------------------------------------

#: Elements that may share a norm: a multiple of BLOCK_UNIT, so that the codes of a block are whole words.
BLOCK_UNIT, MOST_BLOCK = 64, 8192
#: Elements whose Elias codes share a stream.
ELIAS_RANGE = 8192
NORM_BYTES = 4


def code_layout(bits: int, count: int) -> tuple[torch.dtype, int]:
    """Return the dtype and the length of the array that holds ``count`` codes; those below 8 bits share bytes."""
    return (torch.int16, count) if bits == 16 else (torch.uint8, -(-count * bits // 8))


def check_blocks(bits: int, block: int, norm: int) -> None:
    """Refuse a form of QSGD's records that no kernel has."""
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be in [2, 8], got {bits}")
    if not BLOCK_UNIT <= block <= MOST_BLOCK or block % BLOCK_UNIT:
        raise ValueError(f"block must be a multiple of {BLOCK_UNIT}, at most {MOST_BLOCK}, got {block}")
    check_one_of("norm", norm, (0, 2))


def qsgd_record_bytes(bits: int, block: int) -> int:
    """Return the bytes of a record: the norm and the codes of a block."""
    check_blocks(bits, block, 0)
    return NORM_BYTES + block * bits // 8


def whole_records(nbytes: int, bits: int, block: int) -> int:
    """Return how many records some bytes are."""
    number, rest = divmod(nbytes, qsgd_record_bytes(bits, block))
    if rest:
        raise ValueError(f"out must hold whole records of {qsgd_record_bytes(bits, block)} bytes, {rest} are left")
    return number


def least_error(bits: int, block: int) -> float:
    """Return the least bound of a block's squared error, as a share of its squares, that levels always meet.

    The distance of levels is then at most that of the largest magnitude's, of which no element is lost by more than a
    half, and where numbers are so small that they have few digits, by more than a whole.
    """
    check_blocks(bits, block, 0)
    return block / ((1 << (bits - 1)) - 1) ** 2


def elias_bound(count: int, *, bits: int, block: int) -> int:
    """Return the most bytes that the section of a tensor takes: ``2 * bits - 1`` bits for each element."""
    check_blocks(bits, block, 0)
    length = max(1, ELIAS_RANGE // block) * block
    ranges, rest = divmod(count, length)
    streams = ranges * -(-(2 * bits - 1) * length // 8) + -(-(2 * bits - 1) * rest // 8)
    return 4 * row_count(count, length) + NORM_BYTES * row_count(count, block) + streams


# ---- positions and values -----------------------------------------------------------------------

MAX_POSITIONS = (1 << 31) - 1  # positions are 32 bits wide
MAX_PARAMETER = 20
MAX_STREAM = (1 << 32) - 1  # bytes of a range, counted in 32 bits
#: How values are sent: in the dtype of the arithmetic, in 16 bits, as a sign of one mean, or as codes of a few levels.
FORMS = {"full": 0, "float16": 1, "bfloat16": 2, "signs": 3, "codes2": 4, "codes4": 5, "codes8": 6}
FORM_NAMES = tuple(FORMS)
#: The bits of a code.
CODE_BITS = {"codes2": 2, "codes4": 4, "codes8": 8}
MOST_CHUNK = 4096


def levels_of(form: str) -> int:
    """Return how many levels the codes of a form have, 0 where it has no codes."""
    return 1 << CODE_BITS[form] - 1 if form in CODE_BITS else 0


def head_bytes(form: int, value_bytes: int) -> int:
    """Return the bytes of what a section of a form says of all values: their mean, or the levels of codes."""
    return value_bytes if form == FORMS["signs"] else 4 * levels_of(FORM_NAMES[form])


def golomb_parameter(k: int, count: int) -> int:
    """Return the parameter that codes ``k`` positions among ``count`` elements in the fewest bits.

    That is ``1 + floor(log2(log((sqrt(5) - 1) / 2) / log(1 - k / count)))`` within [0, 20]: the
    number of ``j >= 0`` for which ``q = (1 - k / count) ** 2 ** j`` is at least
    ``(sqrt(5) - 1) / 2``, or ``q * q + q >= 1``. Integers decide, so that all ranks agree.
    """
    check_chosen(k, count)
    one = 1 << 256
    power, parameter = (count - k) * one // max(count, 1), 0
    while parameter < MAX_PARAMETER and power * power + power * one >= one * one:
        power = power * power // one
        parameter += 1
    return parameter


def golomb_ranges(count: int, b: int) -> int:
    """Return how many ranges ``count`` elements have under a parameter."""
    return -(-count >> b + 11)


def golomb_bound(k: int, count: int, b: int, value_bytes: int) -> int:
    """Return the most bytes that a section of at most ``k`` positions takes.

    The unary parts of all gaps are at most ``count >> b`` ones, and at most 2047 in a range.
    """
    check_parameter(b)
    ranges = golomb_ranges(count, b)
    touched = min(k, ranges)
    bits = min(k, count) * (1 + b) + min(2047 * touched, count >> b)
    return value_bytes + 4 * ranges + (bits + 7 * touched) // 8


def values_bound(k: int, count: int, b: int, value_bytes: int, *, form: str = "full") -> int:
    """Return the most bytes that a section of at most ``k`` positions with values takes.

    Args:
        value_bytes: of the dtype of the arithmetic.
    """
    check_one_of("form", form, FORMS)
    ranges = golomb_ranges(count, b)
    positions = golomb_bound(k, count, b, 0) + 4 * ranges
    if form == "signs" or form in CODE_BITS:
        head, bits = (4 * levels_of(form), CODE_BITS[form]) if form in CODE_BITS else (value_bytes, 1)
        return positions + head + (bits * min(k, count) + 7 * min(k, ranges)) // 8
    return positions + min(k, count) * (value_bytes if form == "full" else 2)


def check_parameter(b: int) -> None:
    """Refuse a parameter of the code that no kernel takes."""
    if not 0 <= b <= MAX_PARAMETER:
        raise ValueError(f"b must be in [0, {MAX_PARAMETER}], got {b}")


def check_positions(count: int) -> None:
    """Refuse a tensor whose positions do not fit in 32 bits."""
    if count > MAX_POSITIONS:
        raise ValueError(f"a tensor must have at most {MAX_POSITIONS} elements, got {count}")


def check_coded(count: int, b: int) -> None:
    """Refuse to decode positions that cannot be coded."""
    check_parameter(b)
    check_positions(count)


def check_chosen(k: int, count: int) -> None:
    """Refuse to choose more elements than there are, or among too many."""
    check_positions(count)
    if not 0 <= k <= count:
        raise ValueError(f"k must be in [0, {count}], the number of elements, got {k}")


def check_kept(given: int, kept: int, b: int, elements: int) -> None:
    """Refuse to code the first ``kept`` positions where there are not so many, or the code cannot hold them."""
    check_coded(elements, b)
    if not 0 <= kept <= min(given, elements):
        raise ValueError(f"kept must be in [0, {min(given, elements)}], got {kept}")


def check_chunks(count: int, chunk: int, k: int, last: int) -> None:
    """Refuse chunks that no kernel takes, and more elements than they have."""
    check_positions(count)
    rest = count % max(chunk, 1)
    if not 1 <= chunk <= MOST_CHUNK:
        raise ValueError(f"chunk must be in [1, {MOST_CHUNK}], got {chunk}")
    if not 1 <= k <= chunk or not min(rest, 1) <= last <= min(rest, k):
        raise ValueError(f"k must be in [1, {chunk}] and last in [{min(rest, 1)}, {min(rest, k)}], got {k} and {last}")


def chosen_in_chunks(count: int, chunk: int, k: int, last: int) -> int:
    """Return how many elements are chosen at most, ``k`` of each whole chunk and ``last`` of the rest."""
    return count // chunk * k + last


def groups_of(count: int, values: Tensor, block: int) -> int:
    """Return of how many groups of blocks these are the values."""
    check_positions(count)
    if not 1 <= block <= max(count, 1):
        raise ValueError(f"block must be in [1, {max(count, 1)}], got {block}")
    blocks, (k, rest) = -(-count // block), divmod(values.numel(), block)
    if rest or not min(blocks, 1) <= k <= blocks:
        least = min(blocks, 1) * block
        raise ValueError(
            f"values must hold {least} to {blocks * block} elements, {block} for each group, got {values.numel()}"
        )
    return k


def check_sample_draws(k: int, first: int) -> None:
    """Refuse draws beyond what a key has numbers for."""
    if first < 0 or first + k > MAX_DRAWS // 2:
        raise ValueError(f"draws must lie in [0, {MAX_DRAWS // 2}), got {first} + {k}")


def check_stream(kept: int, b: int) -> None:
    """Refuse what could give a range a stream whose length does not fit in 32 bits."""
    bits = min(kept, 1 << b + 11) * (1 + b) + 2047
    if bits > 8 * MAX_STREAM:
        raise ValueError(f"kept must be small enough for streams of at most {MAX_STREAM} bytes, got {kept} with b {b}")


# ---- sketches and factors -----------------------------------------------------------------------

SKETCH_ROWS = (1, 3, 5)
#: Elements that are laid out together; the places of a row, of this many cells, are a prime number.
SKETCH_BLOCK = 16
#: Tensors and spans begin at multiples of this.
SKETCH_ALIGNMENT = 64
MAX_SKETCHED = 1 << 31


@lru_cache(maxsize=1024)
def _is_prime(number: int) -> bool:
    return number >= 2 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def sketch_columns(target: int) -> int:
    """Return the largest number of columns that a table can have, at most ``max(target, 32)``."""
    places = min(max(target, 2 * SKETCH_BLOCK), MAX_SKETCHED) // SKETCH_BLOCK
    while not _is_prime(places):
        places -= 1
    return SKETCH_BLOCK * places


def table_places(table: Tensor, rows: int) -> int:
    """Return the places of a row of a table."""
    check_one_of("rows", rows, SKETCH_ROWS)
    wide("table", table)
    cells = table.numel()
    places = cells // (rows * SKETCH_BLOCK)
    if cells != rows * SKETCH_BLOCK * places or not _is_prime(places) or places * SKETCH_BLOCK > MAX_SKETCHED:
        raise ValueError(
            f"table must have {rows} rows of {SKETCH_BLOCK} * C columns, C prime and at most "
            f"{MAX_SKETCHED // SKETCH_BLOCK} (sketch_columns chooses them), got {cells} cells"
        )
    return places


def check_sketched(offset: int, count: int) -> None:
    """Refuse a tensor at a place that a sketch cannot have it at."""
    if offset < 0 or offset % SKETCH_ALIGNMENT or offset + count > MAX_SKETCHED:
        raise ValueError(
            f"offset must be a multiple of {SKETCH_ALIGNMENT}, and elements must lie in [0, {MAX_SKETCHED}), "
            f"got {offset} + {count}"
        )


def check_spans(spans: Sequence[tuple[int, int]]) -> None:
    """Refuse spans of a bucket that overlap, or are where no tensor can be."""
    end = 0
    for start, count in spans:
        if start < end or start % SKETCH_ALIGNMENT or count < 0 or start + count > MAX_SKETCHED:
            raise ValueError(
                f"spans must be pairs (start, count) with starts that are multiples of {SKETCH_ALIGNMENT}, ascending, "
                f"apart and below {MAX_SKETCHED}, got ({start}, {count}) after the end {end}"
            )
        end = start + count


def line_length(name: str, numbers: int, rank: int) -> int:
    """Return the length of the lines of a factor."""
    if rank < 1 or numbers < rank or numbers % rank:
        raise ValueError(f"{name} must be rank >= 1 lines of at least one number, got {numbers} for rank {rank}")
    return numbers // rank


def matrix_shape(count: int, rows: int, right: Tensor) -> tuple[int, int]:
    """Return the columns of a matrix, and the rank of its factors."""
    if rows < 1 or count < rows or count % rows:
        raise ValueError(f"grad must be rows >= 1 rows of at least one element, got {count} elements in {rows} rows")
    columns, numbers = count // rows, right.numel()
    if numbers < columns or numbers % columns:
        raise ValueError(f"right must be rank >= 1 lines of {columns} numbers, got {numbers}")
    return columns, numbers // columns
