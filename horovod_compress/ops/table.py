"""One row for each kernel: what its arrays are, where it may not write, and how it is called.

From a row come, in :mod:`.dispatch`, the checks of the arguments and the call of the compiled kernel or its reference,
and the cases of the kernel's tests. A kernel of batches takes members of each tensor, in the order of the structs in
csrc/kernels.h; others take their arrays once.

What depends on a call is an expression: of the sizes and lengths of arrays, of the options, of ``n``, the elements of
the array ``of``, and of the functions of :mod:`.sizes` and :mod:`.legality`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

#: How many elements an array has, for a tensor of ``n`` elements.
ROWS, WORDS = "-(-n // row_length)", "(n + 63) >> 6"
#: Whatever an array has: its length is checked elsewhere, if at all.
ANY_LENGTH = ""


class Dtype(Enum):
    """A dtype that depends on the tensors; a ``torch.dtype`` stands for itself, a text for the dtype that it gives."""

    ANY = "any"  # floating, the same in all of a batch
    WORK = "work"  # of the arithmetic for `Operation.of`: float64 for float64, else float32
    WIDE = "wide"  # float32 or float64
    KEPT = "kept"  # that of the arithmetic, or bfloat16 for all tensors


@dataclass(frozen=True)
class Member:
    """What a kernel takes, of each tensor or once."""

    name: str

    @property
    def many(self) -> str:
        """Return the name of the column that holds it for all tensors."""
        return self.name if self.name.endswith(("s", "est", "kept", "left")) else f"{self.name}s"


@dataclass(frozen=True)
class Array(Member):
    """An array.

    Attributes:
        size: how many elements it has.
        disjoint: arrays that it may not share memory with.
        by_rank: it is a list, with one array for each rank, or for each row of what is kept. Their addresses are what
            the kernel takes; where they are of any length, pairs of addresses and lengths.
        shared_out: which of them belong to tensor i of a batch.
    """

    kind: Dtype | torch.dtype | str
    size: str = "n"
    optional: bool = False
    written: bool = False
    disjoint: str = ""
    by_rank: bool = False
    shared_out: str = ""


@dataclass(frozen=True)
class Number(Member):
    """A whole number of each tensor, 0 where none is given, and what it has to fulfil."""

    check: str = ""


@dataclass(frozen=True)
class Operation:
    """What is known of one kernel.

    Attributes:
        call: what the kernel takes, but for the counter and how to launch it: ``rows`` are the members of all tensors,
            ``x_at`` and ``x_code`` are the address and the dtype of an array x.
        members: what it takes of each tensor of a batch; none where it takes no batches.
        arrays: what it takes once.
        options: what else a call gives, by the names that the reference has for it.
        first: statements that go before the checks of arrays.
        of: the array whose elements are counted, and whose dtype is that of the work.
        counts: whether it counts something, of each tensor of a batch or in all.
        on_host: whether arrays have to be in host memory, whatever the device of the step.
    """

    name: str
    call: str
    members: tuple[Array | Number, ...] = ()
    arrays: tuple[Array, ...] = ()
    options: str = ""
    first: tuple[str, ...] = ()
    of: str = "grad"
    counts: bool = False
    on_host: bool = False

    @property
    def given(self) -> tuple[Array | Number, ...]:
        """Return the members that a call gives: all but ``count``."""
        return tuple(member for member in self.members if member is not COUNT)


new, maybe, each = partial(Array, written=True), partial(Array, optional=True), partial(Array, by_rank=True)
ANY, WORK, WIDE, KEPT = Dtype.ANY, Dtype.WORK, Dtype.WIDE, Dtype.KEPT
U8, I32, I64, F32, F64 = torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64
COUNT, ROW_LENGTH = Number("count"), Number("row_length", "row_count(n, row_length)")
OFFSET, WORD_OFFSET = Number("offset", "check_draws(offset, n)"), Number("word_offset", "check_words(word_offset, n)")
GRAD, RESIDUAL, DIVISOR = Array("grad", ANY), maybe("residual", WORK), maybe("divisor", WORK)
SHORT_RESIDUAL, ROUNDED = maybe("residual", KEPT), ("check_rounding(rounding, residual_kind)",)
BLOCK_WORDS = "word_count(row_count(n, block))"
MARKED = maybe("bits", I64, BLOCK_WORDS)
INTO = new("into", I64, disjoint="other")
CODES = ("code_layout(bits, 0)[0]", "code_layout(bits, n)[1]")
NORMS, NEW_CODES = Array("norms", WORK, ROWS), new("codes", *CODES, disjoint="grad")
CODED = (Array("codes", *CODES), NORMS, COUNT, ROW_LENGTH, new("grad", ANY, disjoint="codes"))
PARTS = ("check_parts(parts)",)
KEPT_ROWS = (each("before", I64, "words"), each("after", I64, "words", written=True))
SHAPED = "before = kept_rows('before', before, states)", "after = kept_rows('after', after, states)"
SECTIONS = each("sections", U8, ANY_LENGTH)
#: As many of each tensor of a batch, those of the first one first.
OF_TENSORS = each("sections", U8, ANY_LENGTH, shared_out="i * ranks : (i + 1) * ranks")
OF_RANKS = ("ranks = ranks_of(sections, number)", "check_own(own, ranks)")
CODED_BY = Number("parameter", "check_coded(n, parameter)")
#: Where sections begin in `out`, and where the last one ends.
ENDS = new("ends", I64, "number + 1", disjoint="out", shared_out="i : i + 2")
#: The same for one section.
PLACE = new("place", I64, "2", disjoint="out")
RECORDS = "record_bytes(block) * -(-n // block)"
NUMBERS = new("numbers", I64, "3", disjoint="grad residual positions")
CHOSEN = Number("k", "check_chosen(k, n)")
TABLE_OF = "places = table_places(table, rows)"
SAMPLED = "groups = groups_of(n, values, block)", "check_sample_draws(groups, first)"
MATRIX = ("columns, rank = matrix_shape(n, rows, right)",)
LEFT, RIGHT = ("left", WORK, "rank * rows"), ("right", WORK, "rank * columns")

TABLE = (
    # ---- signs
    Operation("sign_pack", "x_at, x_code, n, bits_at", arrays=(Array("x", ANY), new("bits", I64, WORDS)), of="x"),
    Operation("sign_offer", "rows, grad_code, residual_code, ranks, scale, key and key.words()",
        (GRAD, SHORT_RESIDUAL, DIVISOR, COUNT, ROW_LENGTH, WORD_OFFSET, new("bits", I64, WORDS),
         new("steps", F32, ROWS, optional=True), new("sums", F64, ROWS, optional=True)),
        options="ranks scale key", counts=True),
    Operation("sign_decode",
        "rows, grad_code, residual_code, FEEDBACK[feedback], decay, scale, key and key.words(), "
        "rounding and rounding.words()",
        (Array("bits", I64, WORDS), maybe("zeros", I64, WORDS), Array("steps", F32, ROWS), DIVISOR, COUNT, ROW_LENGTH,
         WORD_OFFSET, new("grad", ANY, disjoint="divisor"),
         new("residual", KEPT, optional=True, disjoint="grad divisor")),
        options="feedback decay scale key rounding", first=ROUNDED),
    Operation("two_value_offer", "rows, grad_code, residual_code",
        (GRAD, SHORT_RESIDUAL, COUNT, ROW_LENGTH, new("bits", I64, WORDS), new("highs", F64, ROWS),
         new("lows", F64, ROWS, disjoint="highs"), new("ones", I64, ROWS)),
        counts=True),
    Operation("two_value_decode",
        "rows, grad_code, residual_code, bits_at, highs_at, lows_at, len(bits), own, scale, "
        "rounding and rounding.words()",
        (COUNT, ROW_LENGTH, Number("first_word", "check_inside('words', first_word, word_count(n), words)"),
         Number("first_row", "check_inside('rows', first_row, row_count(n, row_length), number_of_rows)"),
         new("grad", ANY), new("residual", KEPT, disjoint="grad")),
        (each("bits", I64, "words"), each("highs", F32, "number_of_rows"),
         Array("lows", F32, "number_of_rows", optional=True, by_rank=True)),
        options="own scale rounding", first=("words, number_of_rows = bits[0].numel(), highs[0].numel()", *ROUNDED)),
    Operation("merge_bits", "into_at, other_at, n, weight_other, weight_into + weight_other, key.words(), word_offset",
        arrays=(INTO, Array("other", I64)), options="weight_into weight_other key word_offset", of="into",
        first=("check_odds(weight_other, weight_into + weight_other)", "check_words(word_offset, 64 * n)")),
    Operation(
        "bernoulli_words", "out_at, n, numerator, denominator, key.words(), word_offset", arrays=(new("out", I64),),
        options="numerator denominator key word_offset", of="out",
        first=("check_odds(numerator, denominator)", "check_words(word_offset, 64 * n)")),
    Operation("majority_fold", "parts_at, len(parts), count, out_at", options="count", of="out", first=PARTS,
        arrays=(each("parts", I64, "word_count(count)"), new("out", I64, "word_count(count)"))),
    Operation("shaped_merge", "into_at, other_at, n, ranks, before_at, after_at", of="into", options="ranks",
        arrays=(INTO, Array("other", I64), *KEPT_ROWS), first=("words, states = n, ranks", *SHAPED)),
    Operation("shaped_fold", "parts_at, states, n, out_at, before_at, after_at", of="out",
        arrays=(each("parts", I64), new("out", I64), *KEPT_ROWS), first=("words, states = n, len(parts)", *SHAPED)),
    Operation("ternary_fold", "parts_at, len(parts), words, out_at, before_at, after_at", of="out",
        arrays=(each("parts", I64, "words"), new("out", I64), *KEPT_ROWS),
        first=("words, states = unpacked_words(n), ternary_states(len(parts))", *SHAPED)),
    Operation(
        "ternary_unpack", "packed_at, words, bits_at, zeros_at", of="packed", first=("words = unpacked_words(n)",),
        arrays=(Array("packed", I64), new("bits", I64, "words", disjoint="zeros"), new("zeros", I64, "words"))),
    Operation("record_offer", "grad_at, residual_at, grad_code, n, block, RECORD_RULES[rule], records_at",
        arrays=(GRAD, RESIDUAL, new("records", U8, RECORDS, disjoint="grad residual")), options="block rule",
        first=("check_one_of('rule', rule, ('l1', 'l2'))",), counts=True),
    Operation("record_fold",
        "parts_at, len(parts), kept_code, n, block, RECORD_RULES[rule], kept_at, left_at, out_at", of="kept",
        arrays=(each("parts", U8, RECORDS), Array("kept", WIDE), new("left", "kept_kind", disjoint="kept"),
                new("out", U8, RECORDS)),
        options="block rule", first=("check_one_of('rule', rule, RECORD_RULES)", *PARTS)),
    Operation("record_decode", "records_at, scales_at, grad_code, n, block, float(scale), grad_at, residual_at",
        arrays=(Array("records", U8, RECORDS), Array("scales", F32, "-(-n // block)"), new("grad", ANY),
                new("residual", WORK, disjoint="grad")),
        options="block scale"),
    # ---- plain numbers
    Operation(
        "dense_offer", "rows, grad_code, residual_code, out_code",
        (GRAD, SHORT_RESIDUAL, COUNT, new("out", ANY, disjoint="grad residual")), counts=True),
    Operation("dense_add", "into_at, other_at, into_code, n", of="into",
        arrays=(new("into", ANY, disjoint="other"), Array("other", "into_kind"))),
    Operation("dense_decode", "rows, payload_code, grad_code, residual_code, scale",
        (Array("payload", ANY), COUNT, new("grad", ANY, disjoint="payload"),
         new("residual", KEPT, optional=True, disjoint="payload grad")),
        options="scale"),
    Operation("absorb", "grad_at, residual_at, momentum_at, float(factor), grad_code, n", options="factor",
        arrays=(new("grad", ANY), new("residual", WORK, disjoint="grad"),
                new("momentum", WORK, optional=True, disjoint="grad residual"))),
    Operation("triad", "a_at, b_at, c_at, s, n", options="s", of="a",
        arrays=(new("a", F32), Array("b", F32), Array("c", F32))),
    Operation("union_mark", "rows, grad_code, block",
        (GRAD, COUNT, new("bits", I64, BLOCK_WORDS, disjoint="grad")), options="block", counts=True),
    Operation("union_count", "rows, block",
        (Array("bits", I64), Number("elements", "check_marked(n, elements, block)")),
        options="block", of="bits", counts=True),
    Operation("union_encode", "rows, grad_code, block",
        (GRAD, MARKED, COUNT, Number("kept"), new("values", WORK, "kept", disjoint="grad bits")), options="block"),
    Operation("union_decode", "rows, grad_code, block, scale",
        (Array("values", WORK, "kept"), MARKED, COUNT, Number("kept"), new("grad", ANY, disjoint="values bits")),
        options="block scale"),
    Operation("adam_hold", "rows, second_code, adam_scales(betas, step, bound, left)",
        (new("second", ANY), Array("first", "second_kind", disjoint="second"),
         Array("grad", "second_kind", disjoint="second"),
         Array("square", WORK, disjoint="second"),
         maybe("floors", WORK, ANY_LENGTH, disjoint="second"), COUNT, ROW_LENGTH),
        options="betas step bound left", of="second"),
    Operation("adam_step",
        "rows, weight_code, adam_step_scales(betas, step, bound, lr, eps, by, weight_decay, decoupled)",
        (new("weight", ANY), new("first", "weight_kind", disjoint="weight"),
         Array("grad", "weight_kind", disjoint="weight first"),
         Array("square", WORK, disjoint="weight first"),
         maybe("floors", WORK, ANY_LENGTH, disjoint="weight first"), COUNT, ROW_LENGTH),
        options="betas step bound lr eps by weight_decay decoupled", of="weight"),
    Operation("sgd_step", "rows, weight_code, sgd_step_scales(lr, momentum, dampening, nesterov, by, weight_decay)",
        (new("weight", ANY), new("buffer", "weight_kind", optional=True, disjoint="weight"),
         Array("grad", "weight_kind", disjoint="weight buffer"), COUNT),
        options="lr momentum dampening nesterov by weight_decay", of="weight"),
    # ---- codes on a scale
    Operation("norm_offer", "rows, grad_code, power",
        (GRAD, COUNT, ROW_LENGTH,
         new("norms", "torch.float64 if power else WORK_DTYPES[grad_kind]", ROWS, disjoint="grad")),
        options="power", counts=True),
    Operation("moments_offer", "rows, grad_code",
        (GRAD, COUNT, ROW_LENGTH, new("largest", WORK, ROWS, disjoint="grad"),
         new("squares", F64, ROWS, disjoint="grad")),
        counts=True),
    Operation("uniform_encode", "rows, grad_code, bits, levels, key and key.words()",
        (GRAD, NORMS, COUNT, ROW_LENGTH, OFFSET, NEW_CODES, maybe("bounds", WORK, ROWS)), options="key bits levels"),
    Operation("uniform_add", "into_at, other_at, n, bits", options="bits", of="into",
        arrays=(new("into", "code_layout(max(bits, 8), 0)[0]", disjoint="other"), Array("other", "into_kind"))),
    Operation(
        "uniform_fold", "parts_at, len(parts), count, bits, sum_bits, out_at", options="count bits sum_bits", of="out",
        arrays=(each("parts", U8, "code_layout(bits, count)[1]"),
                new("out", U8, "code_layout(sum_bits, count)[1]", disjoint="parts")),
        first=PARTS),
    Operation("uniform_decode", "rows, grad_code, bits, scale", CODED, options="bits scale"),
    Operation("exponential_encode", "rows, grad_code, bits, headroom, mantissa, key.words()",
        (GRAD, NORMS, COUNT, ROW_LENGTH, OFFSET, NEW_CODES), options="key bits headroom mantissa"),
    Operation(
        "exponential_merge", "into_at, other_at, n, bits, key.words(), offset", options="key bits offset", of="into",
        arrays=(new("into", U8, disjoint="other"), Array("other", U8)), first=("check_draws(offset, n * 8 // bits)",)),
    Operation("exponential_fold", "parts_at, len(parts), n, headroom, mantissa, key.words(), offset, out_at",
        arrays=(each("parts", U8), new("out", U8)), options="key headroom mantissa offset", of="out",
        first=(*PARTS, "check_draws(offset, n)")),
    Operation("exponential_decode", "rows, grad_code, bits, headroom, mantissa, scale", CODED,
        options="bits headroom mantissa scale"),
    Operation("qsgd_encode", "rows, grad_code, (bits, block, norm), key and key.words()",
        (GRAD, COUNT, Number("offset", "check_draws(offset, -(-n // block) * block)"),
         new("records", U8, "-(-n // block) * size", disjoint="grad")),
        options="key bits block norm", first=("size = qsgd_record_bytes(bits, block)",), counts=True),
    Operation("qsgd_fold", "parts_at, len(parts), records, (bits, block, norm), key.words(), offset, out_at",
        arrays=(each("parts", U8), new("out", U8)), options="key bits block norm offset", of="out",
        first=(*PARTS, "records = whole_records(n, bits, block)", "check_draws(offset, records * block)")),
    Operation("qsgd_decode", "rows, grad_code, (bits, block, 0), scale",
        (Array("records", U8, "-(-n // block) * size"), COUNT, new("grad", ANY, disjoint="records")),
        options="bits block scale", first=("size = qsgd_record_bytes(bits, block)",)),
    Operation("loco_encode", "rows, grad_code, (bits, block, norm), kept_bits, float(beta)",
        (GRAD, maybe("kept", U8, "-(-n // block) * kept_size"), COUNT,
         new("records", U8, "-(-n // block) * size", disjoint="grad kept"),
         new("left", U8, "-(-n // block) * kept_size", disjoint="grad kept records")),
        options="bits block norm kept_bits beta",
        first=("size, kept_size = (qsgd_record_bytes(width, block) for width in (bits, kept_bits))",), counts=True),
    Operation("loco_fold",
        "parts_at, len(parts), records, (bits, block, norm), kept_bits, float(beta), kept_at, out_at, left_at",
        arrays=(each("parts", U8), maybe("kept", U8, "records * kept_size", disjoint="out"), new("out", U8),
                new("left", U8, "records * kept_size", disjoint="parts kept out")),
        options="bits block norm kept_bits beta", of="out",
        first=(*PARTS, "records = whole_records(n, bits, block)", "kept_size = qsgd_record_bytes(kept_bits, block)")),
    Operation("elias_encode",
        "grad_at, grad_code, n, (bits, block, norm), float(error), key and key.words(), offset, place_at, out_at, "
        "out.numel()",
        arrays=(GRAD, PLACE, new("out", U8, ANY_LENGTH, disjoint="grad")), options="key bits block norm offset error",
        first=("check_room('out', out, begin_of(place) + elias_bound(n, bits=bits, block=block))",
               "check_draws(offset, -(-n // block) * block)"), counts=True),
    Operation("elias_decode", "sections_at, ranks, grad_code, n, (bits, block, 0), scale, grad_at",
        arrays=(SECTIONS, new("grad", ANY)), options="bits block scale", first=("ranks = ranks_of(sections, 1)",),
        counts=True),
    # ---- count sketches
    Operation("norm_sketch", "rows, grad_code, counters // 16, key.words()",
        (GRAD, COUNT, Number("offset", "check_sketched(offset, n)"),
         new("sums", F64, "counters", disjoint="grad")),
        options="key counters", first=("check_one_of('counters', counters, (128, 256))",)),
    Operation("sketch_encode",
        "grad_at, residual_at, momentum_at, float(factor), grad_code, n, offset, rows, places, key.words(), table_at",
        arrays=(GRAD, RESIDUAL, maybe("momentum", WORK),
                new("table", WORK, ANY_LENGTH, disjoint="grad residual momentum")),
        options="rows key offset factor", first=(TABLE_OF, "check_sketched(offset, n)"), counts=True),
    Operation("sketch_top",
        "table_at, table_code, rows, places, key.words(), spans, len(spans), k, positions_at, estimates_at", of="table",
        arrays=(Array("table", WIDE), new("positions", I64, "k", disjoint="table"),
                new("estimates", "table_kind", "k", disjoint="table positions")),
        options="rows key spans k", first=(TABLE_OF,)),
    Operation(
        "sketch_clear", "table_at, table_code, rows, places, key.words(), positions_at, positions.numel()", of="table",
        arrays=(new("table", WIDE), Array("positions", I64, ANY_LENGTH, disjoint="table")), options="rows key",
        first=(TABLE_OF,)),
    # ---- positions and values
    Operation("top_select", "rows, grad_code, whole",
        (GRAD, RESIDUAL, COUNT, CHOSEN, new("positions", I32, "k", disjoint="grad residual"),
         new("values", WORK, "k", disjoint="grad residual positions"), NUMBERS),
        options="whole"),
    Operation("binary_select", "rows, grad_code, whole",
        (GRAD, RESIDUAL, COUNT, CHOSEN, new("positions", I32, "k", disjoint="grad residual"),
         new("mean", WORK, "1", disjoint="grad residual positions"), NUMBERS),
        options="whole"),
    Operation("chunk_select", "rows, grad_code, chunk, k",
        (GRAD, RESIDUAL, COUNT, Number("last", "check_chunks(n, chunk, k, last)"),
         new("positions", I32, "chosen_in_chunks(n, chunk, k, last)", disjoint="grad residual"),
         new("values", WORK, "chosen_in_chunks(n, chunk, k, last)", disjoint="grad residual positions"), NUMBERS),
        options="chunk k"),
    Operation("codebook_fit", "values_at, values_code, n, bits, levels_at", of="values",
        arrays=(Array("values", WIDE), new("levels", F32, "1 << bits - 1", disjoint="values")), options="bits",
        first=("check_one_of('bits', bits, (2, 4, 8))",)),
    Operation("binary_encode", "rows, mean_code, ends_at, out_at, out.numel()", of="positions",
        members=(Array("positions", I32, disjoint="out"), Number("kept"), Array("mean", WIDE, "1", disjoint="out"),
                 Number("elements"), Number("parameter", "check_kept(n, kept, parameter, elements); "
                 "check_stream(kept, parameter); "
                 "least = with_room(out, least, golomb_bound(kept, elements, parameter, width), i + 1 == number)")),
        arrays=(ENDS, new("out", U8, ANY_LENGTH)), first=("width, least = mean_kind.itemsize, begin_of(ends)",)),
    Operation("binary_decode", "rows, grad_code, sections_at, ranks, own, float(scale)",
        (CODED_BY, COUNT, new("grad", ANY, disjoint="sections"),
         new("residual", WORK, optional=True, disjoint="sections grad")),
        (OF_TENSORS,), options="own scale", first=OF_RANKS, counts=True),
    Operation("binary_clear", "[(section_at, section.numel())], b, tensor_code, n, tensor_at", options="b", of="tensor",
        arrays=(Array("section", U8, ANY_LENGTH), new("tensor", ANY, disjoint="section")),
        first=("check_coded(n, b)",), counts=True),
    Operation("values_encode", "rows, values_code, ends_at, out_at, out.numel()", of="positions",
        members=(Array("positions", I32, disjoint="out"), Number("kept"), Array("values", WIDE, disjoint="out"),
                 maybe("head", U8, "head_bytes(form, width)", disjoint="out"), Number("form"), Number("elements"),
                 Number("parameter", "check_kept(n, kept, parameter, elements); least = with_room(out, least, "
                 "values_bound(kept, elements, parameter, width, form=FORM_NAMES[form]), i + 1 == number)")),
        arrays=(ENDS, new("out", U8, ANY_LENGTH)), first=("width, least = values_kind.itemsize, begin_of(ends)",)),
    Operation("values_decode",
        "rows, grad_code, sections_at, ranks, own, float(scale), float(factor), bool(masking), float(decay), "
        "bool(by_senders)",
        (Number("form"), CODED_BY, COUNT, new("grad", ANY),
         new("residual", WORK, optional=True, disjoint="grad"),
         new("momentum", WORK, optional=True, disjoint="grad residual")),
        (OF_TENSORS,), options="own scale factor masking decay by_senders", first=OF_RANKS, counts=True),
    Operation("sample_offer", "grad_at, residual_at, grad_code, n, block, groups, key.words(), first, values_at",
        arrays=(GRAD, RESIDUAL, new("values", WORK, ANY_LENGTH, disjoint="grad residual")), options="key first block",
        first=SAMPLED, counts=True),
    Operation("sample_decode",
        "values_at, grad_code, n, block, groups, key.words(), first, float(scale), bool(weighted), grad_at, "
        "residual_at",
        arrays=(Array("values", WORK, ANY_LENGTH), new("grad", ANY, disjoint="values"),
                new("residual", WORK, optional=True, disjoint="values grad")),
        options="key scale first weighted block", first=SAMPLED),
    # ---- factors of low rank
    Operation(
        "lowrank_start", "kept_at, kept_code, columns, rank, key.words(), offset, right_at", options="rank key offset",
        arrays=(Array("kept", WIDE), new("right", "kept_kind", disjoint="kept")), of="kept",
        first=("columns = line_length('kept', n, rank)", "check_draws(offset, n)")),
    Operation("lowrank_left", "grad_at, residual_at, grad_code, rows, columns, rank, right_at, left_at", options="rows",
        arrays=(GRAD, RESIDUAL, Array(*RIGHT), new(*LEFT, disjoint="grad residual right")), first=MATRIX, counts=True),
    Operation(
        "lowrank_orthonormalise", "lines_at, lines_code, length, rank", arrays=(new("lines", WIDE),), options="rank",
        of="lines", first=("length = line_length('lines', n, rank)",)),
    Operation(
        "lowrank_right", "grad_at, residual_at, grad_code, rows, columns, rank, left_at, right_at", options="rows",
        arrays=(GRAD, RESIDUAL, Array(*LEFT), new(*RIGHT, disjoint="grad residual left")), first=MATRIX),
    Operation("lowrank_decode",
        "left_at, right_at, grad_code, rows, columns, rank, float(scale), grad_at, residual_at",
        arrays=(Array(*LEFT), Array(*RIGHT), new("grad", ANY, disjoint="left right"),
                new("residual", WORK, optional=True, disjoint="left right grad")),
        options="rows scale", first=MATRIX),
    # ---- bytes
    Operation("crc32c", "data_at, n, crc", arrays=(Array("data", U8),), options="crc", of="data", on_host=True),
    Operation("crc32c_copy", "dst_at, src_at, n, crc", arrays=(new("dst", U8, disjoint="src"), Array("src", U8)),
        options="crc", of="src", on_host=True),
    Operation("hash64", "data_at, n, seed", arrays=(Array("data", U8),), options="seed", of="data"),
)  # fmt: skip
BY_NAME = {row.name: row for row in TABLE}
