"""The kernels: every function checks its arguments once, then runs compiled code.

All tensors are one-dimensional and contiguous. "Bits" are ``torch.int64`` words: bit ``j`` of word
``w`` is element ``64 * w + j``, and padding bits of the last word are always written 0. Results do
not depend on the number of threads, the alignment, the device or the instruction set.

On CUDA tensors the kernels run on the current stream and return at once; a count of non-finite
elements is then a one-element tensor on the device, and only ``int()`` of it waits.

``HVC_KERNELS=reference`` runs the readable NumPy kernels of :mod:`.reference` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..keys import Key
from .adam import adam_hold_all
from .legality import (
    CPU,
    MAX_PARTS,
    POWERS,
    REFERENCE,
    backend,
    check_apart,
    check_levels,
    check_octaves,
    check_odds,
    check_one_of,
    checked,
    checked_codes,
    code_layout,
    counter_for,
    draw_stream,
    dtype_code,
    row_count,
    word_count,
    word_stream,
    work_dtype,
)
from .lowrank import lowrank_decode, lowrank_left, lowrank_orthonormalise, lowrank_right, lowrank_start
from .points import points_decode, points_decode_all, points_offer, points_offer_all
from .quantise import (
    elias_bound,
    elias_decode,
    elias_encode,
    moments_offer,
    octave_fold,
    qsgd_decode,
    qsgd_encode,
    qsgd_fold,
    qsgd_record_bytes,
)
from .records import RECORD_UNIT, record_bytes, record_decode, record_fold, record_offer
from .shaped import count_rows, shaped_fold, shaped_merge
from .sketch import absorb, sketch_clear, sketch_columns, sketch_encode, sketch_estimate, sketch_top
from .sparse import (
    binary_clear,
    binary_decode,
    binary_encode,
    binary_select,
    count_nonfinite,
    golomb_bound,
    golomb_parameter,
    top_select,
)
from .together import (
    Feedback,
    dense_decode_all,
    dense_offer_all,
    feedback_code,
    sign_decode_all,
    sign_offer_all,
)
from .together_quantise import (
    level_decode_all,
    level_encode_all,
    moments_offer_all,
    norm_offer_all,
    octave_decode_all,
    octave_encode_all,
    qsgd_decode_all,
    qsgd_encode_all,
)
from .values import sample_decode, sample_offer, values_bound, values_decode, values_encode

__all__ = [
    "RECORD_UNIT",
    "Feedback",
    "absorb",
    "adam_hold_all",
    "bernoulli_words",
    "binary_clear",
    "binary_decode",
    "binary_encode",
    "binary_select",
    "code_layout",
    "count_nonfinite",
    "count_rows",
    "crc32c",
    "crc32c_copy",
    "dense_add",
    "dense_decode",
    "dense_decode_all",
    "dense_offer",
    "dense_offer_all",
    "elias_bound",
    "elias_decode",
    "elias_encode",
    "golomb_bound",
    "golomb_parameter",
    "hash64",
    "instruction_set",
    "level_add",
    "level_decode",
    "level_decode_all",
    "level_encode",
    "level_encode_all",
    "lowrank_decode",
    "lowrank_left",
    "lowrank_orthonormalise",
    "lowrank_right",
    "lowrank_start",
    "majority_fold",
    "merge_bits",
    "moments_offer",
    "moments_offer_all",
    "norm_offer",
    "norm_offer_all",
    "octave_decode",
    "octave_decode_all",
    "octave_encode",
    "octave_encode_all",
    "octave_fold",
    "octave_merge",
    "philox4x32",
    "points_decode",
    "points_decode_all",
    "points_offer",
    "points_offer_all",
    "qsgd_decode",
    "qsgd_decode_all",
    "qsgd_encode",
    "qsgd_encode_all",
    "qsgd_fold",
    "qsgd_record_bytes",
    "record_bytes",
    "record_decode",
    "record_fold",
    "record_offer",
    "sample_decode",
    "sample_offer",
    "shaped_fold",
    "shaped_merge",
    "sign_decode",
    "sign_decode_all",
    "sign_offer",
    "sign_offer_all",
    "sign_pack",
    "sign_unpack",
    "sketch_clear",
    "sketch_columns",
    "sketch_encode",
    "sketch_estimate",
    "sketch_top",
    "top_select",
    "triad",
    "values_bound",
    "values_decode",
    "values_encode",
    "word_count",
]


# ---- one bit per element ----------------------------------------------------------------------


def sign_pack(x: Tensor, bits: Tensor) -> None:
    """Write one bit per element: ``x >= 0``, so -0.0 gives 1 and NaN gives 0."""
    native, device, launch = backend(x)
    count = x.numel()
    code = dtype_code("x", x)
    x_at = checked("x", x, x.dtype, count, device)
    bits_at = checked("bits", bits, torch.int64, word_count(count), device)
    if REFERENCE:
        REFERENCE.sign_pack(x, bits)
    else:
        native.sign_pack(x_at, code, count, bits_at, launch)


def sign_offer(
    grad: Tensor,
    residual: Tensor | None,
    bits: Tensor,
    sums: Tensor | None,
    row_length: int,
    *,
    key: Key | None = None,
    word_offset: int = 0,
) -> int | Tensor:
    """Write the signs of ``x = grad + residual`` and the sum of ``|x|`` of every row.

    Args:
        residual: float32 (float64 for float64 gradients), or None for zero.
        sums: float64, one per ``row_length`` elements, summed in one fixed order; None to skip.
        key: names the random bits that exact zeros get; None gives zeros the bit 1.
        word_offset: which word of that stream ``bits[0]`` is.

    Returns:
        The number of elements of ``x`` that are not finite, or 2^96 or more of either sign.
    """
    native, device, launch = backend(grad)
    count = grad.numel()
    words = word_count(count)
    code = dtype_code("grad", grad)
    rows = row_count(count, row_length)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    bits_at = checked("bits", bits, torch.int64, words, device)
    residual_at = sums_at = 0
    if residual is not None:
        residual_at = checked("residual", residual, work_dtype(grad.dtype), count, device)
    if sums is not None:
        sums_at = checked("sums", sums, torch.float64, rows, device)
    stream = word_stream(key, word_offset, words)
    if REFERENCE:
        options = {"key": key, "word_offset": word_offset}
        return int(REFERENCE.sign_offer(grad, residual, bits, sums, row_length, **options))
    counter, counter_at = counter_for(device)
    shape = (code, count, row_length)
    outputs = (bits_at, sums_at, counter_at)
    counted: int = native.sign_offer(grad_at, residual_at, *shape, stream, word_offset, *outputs, launch)
    return counted if counter is None else counter


def sign_decode(
    bits: Tensor,
    steps: Tensor,
    row_length: int,
    grad: Tensor,
    residual: Tensor | None,
    *,
    feedback: Feedback,
    decay: float = 1.0,
    scale: float = 1.0,
    key: Key | None = None,
    word_offset: int = 0,
) -> None:
    """Turn consensus bits into the result, in place over ``grad``, and update the residual.

    With ``G = +-steps[row]`` and ``x = grad + residual``, "global" feedback keeps ``x - G``, "own"
    keeps ``x`` minus the step with the sign that :func:`sign_offer` gave it under the same key,
    "momentum" keeps ``x`` itself, "none" keeps nothing. What is kept is multiplied by ``decay``. Then
    ``grad = G * scale``.

    Args:
        steps: float32, one per ``row_length`` elements.
    """
    native, device, launch = backend(grad)
    count = grad.numel()
    words = word_count(count)
    code = dtype_code("grad", grad)
    rule = feedback_code(feedback, residual is not None)
    rows = row_count(count, row_length)
    bits_at = checked("bits", bits, torch.int64, words, device)
    steps_at = checked("steps", steps, torch.float32, rows, device)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = 0
    if residual is not None:
        residual_at = checked("residual", residual, work_dtype(grad.dtype), count, device)
        check_apart("residual", residual, "grad", grad)
    stream = word_stream(key, word_offset, words)
    if REFERENCE:
        options = {"feedback": feedback, "decay": decay, "scale": scale, "key": key, "word_offset": word_offset}
        REFERENCE.sign_decode(bits, steps, row_length, grad, residual, **options)
    else:
        shape = (code, count, row_length)
        rules = (rule, decay, scale, stream, word_offset)
        native.sign_decode(bits_at, steps_at, *shape, *rules, grad_at, residual_at, launch)


def sign_unpack(bits: Tensor, steps: Tensor, row_length: int, out: Tensor, *, scale: float = 1.0) -> None:
    """Write ``+-steps[row] * scale``."""
    native, device, launch = backend(out)
    count = out.numel()
    code = dtype_code("out", out)
    bits_at = checked("bits", bits, torch.int64, word_count(count), device)
    steps_at = checked("steps", steps, torch.float32, row_count(count, row_length), device)
    out_at = checked("out", out, out.dtype, count, device)
    if REFERENCE:
        REFERENCE.sign_unpack(bits, steps, row_length, out, scale=scale)
    else:
        native.sign_unpack(bits_at, steps_at, code, count, row_length, scale, out_at, launch)


# ---- merging bits -----------------------------------------------------------------------------


def merge_bits(
    into: Tensor,
    other: Tensor,
    weight_into: int,
    weight_other: int,
    key: Key,
    *,
    word_offset: int = 0,
) -> None:
    """Replace each bit of ``into`` by that of ``other`` with probability ``weight_other / total``.

    This is Marsit's operator: the result is an unbiased sample of the weighted signs, and where
    both sides agree it is what they agree on.
    """
    native, device, launch = backend(into)
    words = into.numel()
    total = weight_into + weight_other
    check_odds(weight_other, total)
    into_at = checked("into", into, torch.int64, words, device)
    other_at = checked("other", other, torch.int64, words, device)
    check_apart("into", into, "other", other)
    stream = word_stream(key, word_offset, words)
    if REFERENCE:
        REFERENCE.merge_bits(into, other, weight_into, weight_other, key, word_offset=word_offset)
    else:
        native.merge_bits(into_at, other_at, words, weight_other, total, stream, word_offset, launch)


def bernoulli_words(out: Tensor, numerator: int, denominator: int, key: Key, *, word_offset: int = 0) -> None:
    """Draw bits that are 1 with probability ``numerator / denominator``, exact to 2**-64."""
    native, device, launch = backend(out)
    words = out.numel()
    check_odds(numerator, denominator)
    out_at = checked("out", out, torch.int64, words, device)
    stream = word_stream(key, word_offset, words)
    if REFERENCE:
        REFERENCE.bernoulli_words(out, numerator, denominator, key, word_offset=word_offset)
    else:
        native.bernoulli_words(out_at, words, numerator, denominator, stream, word_offset, launch)


def majority_fold(parts: Sequence[Tensor], out: Tensor, count: int) -> None:
    """Write 1 where at least half of the parts hold 1, for ``count`` bits; may run in place."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"parts must hold 1 to {MAX_PARTS} tensors, got {len(parts)}")
    native, device, launch = backend(out)
    words = word_count(count)
    out_at = checked("out", out, torch.int64, words, device)
    parts_at = [checked(f"parts[{i}]", part, torch.int64, words, device) for i, part in enumerate(parts)]
    if REFERENCE:
        REFERENCE.majority_fold(parts, out, count)
    else:
        native.majority_fold(parts_at, count, out_at, launch)


# ---- dithering ----------------------------------------------------------------------------------


def norm_offer(grad: Tensor, norms: Tensor, row_length: int, *, power: int = 0) -> int | Tensor:
    """Write the norm of every ``row_length`` elements; return how many elements are not finite.

    Those count as 0 in the norm.

    Args:
        norms: with ``power`` 0 the largest ``|x|``, float32 (float64 for float64 gradients); with
            1, 2 or 4 the sum of ``|x| ** power``, float64, summed in one fixed order.
    """
    native, device, launch = backend(grad)
    count = grad.numel()
    code = dtype_code("grad", grad)
    rows = row_count(count, row_length)
    check_one_of("power", power, POWERS)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    norms_at = checked("norms", norms, torch.float64 if power else work_dtype(grad.dtype), rows, device)
    check_apart("norms", norms, "grad", grad)
    if REFERENCE:
        return int(REFERENCE.norm_offer(grad, norms, row_length, power=power))
    counter, counter_at = counter_for(device)
    counted: int = native.norm_offer(grad_at, code, count, row_length, power, norms_at, counter_at, launch)
    return counted if counter is None else counter


def level_encode(
    grad: Tensor,
    norms: Tensor,
    row_length: int,
    codes: Tensor,
    key: Key,
    *,
    bits: int,
    levels: int,
    offset: int = 0,
    bounds: Tensor | None = None,
) -> None:
    """Round ``grad / norm * levels`` to a whole number, up or down at random, without bias.

    16 random bits decide: the probability is right to 2**-17, and a whole number stays what it is.

    Args:
        norms: float32 (float64 for float64 gradients), one per ``row_length`` elements, no less
            than any magnitude there; 0 gives codes 0.
        codes: see :func:`code_layout`.
        levels: the code of the norm, below ``2 ** (bits - 1)``.
        offset: which element of the stream ``grad[0]`` is.
        bounds: like ``norms``: a larger magnitude than this counts as this. None for no bounds.
    """
    native, device, launch = backend(grad)
    count = grad.numel()
    dtype = dtype_code("grad", grad)
    check_levels(bits, levels)
    rows = row_count(count, row_length)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    norms_at = checked("norms", norms, work_dtype(grad.dtype), rows, device)
    bounds_at = 0 if bounds is None else checked("bounds", bounds, norms.dtype, rows, device)
    codes_at = checked_codes(codes, bits, count, row_length, device)
    check_apart("codes", codes, "grad", grad)
    stream = draw_stream(key, offset, count)
    if REFERENCE:
        options = {"bits": bits, "levels": levels, "offset": offset, "bounds": bounds}
        REFERENCE.level_encode(grad, norms, row_length, codes, key, **options)
    else:
        shape = (dtype, count, row_length, bits, levels)
        native.level_encode(grad_at, norms_at, bounds_at, *shape, stream, offset, codes_at, launch)


def level_add(into: Tensor, other: Tensor, *, bits: int) -> None:
    """Add codes of :func:`level_encode`, each modulo ``2 ** bits``; none carries into its neighbour."""
    native, device, launch = backend(into)
    check_one_of("bits", bits, (4, 8, 16))
    dtype, count = code_layout(16 if bits == 16 else 8, into.numel())
    into_at = checked("into", into, dtype, count, device)
    other_at = checked("other", other, dtype, count, device)
    check_apart("into", into, "other", other)
    if REFERENCE:
        REFERENCE.level_add(into, other, bits=bits)
    else:
        native.level_add(into_at, other_at, count, bits, launch)


def level_decode(codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, scale: float) -> None:
    """Write ``(code * scale) * norm`` over ``grad``."""
    native, device, launch = backend(grad)
    count = grad.numel()
    dtype = dtype_code("grad", grad)
    check_one_of("bits", bits, (4, 8, 16))
    grad_at = checked("grad", grad, grad.dtype, count, device)
    norms_at = checked("norms", norms, work_dtype(grad.dtype), row_count(count, row_length), device)
    codes_at = checked_codes(codes, bits, count, row_length, device)
    check_apart("codes", codes, "grad", grad)
    if REFERENCE:
        REFERENCE.level_decode(codes, norms, row_length, grad, bits=bits, scale=scale)
    else:
        native.level_decode(codes_at, norms_at, count, row_length, bits, scale, grad_at, dtype, launch)


def octave_encode(
    grad: Tensor, norms: Tensor, row_length: int, codes: Tensor, key: Key, *, bits: int, headroom: int, offset: int = 0
) -> None:
    """Round ``grad / norm`` to a power of two, up or down at random, without bias.

    A code is a sign (the top bit) and an exponent ``e``, for ``norm * 2 ** (headroom - e)``; 0 is
    zero. 16 random bits decide: the probability is right to 2**-17.

    Args:
        norms: as in :func:`level_encode`.
        bits: 8, or 4 with two codes to a byte.
        headroom: the exponent of the norm itself; sums may come down to 1.
    """
    native, device, launch = backend(grad)
    count = grad.numel()
    dtype = dtype_code("grad", grad)
    check_octaves(bits, headroom)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    norms_at = checked("norms", norms, work_dtype(grad.dtype), row_count(count, row_length), device)
    codes_at = checked_codes(codes, bits, count, row_length, device)
    check_apart("codes", codes, "grad", grad)
    stream = draw_stream(key, offset, count)
    if REFERENCE:
        REFERENCE.octave_encode(grad, norms, row_length, codes, key, bits=bits, headroom=headroom, offset=offset)
    else:
        shape = (dtype, count, row_length, bits, headroom)
        native.octave_encode(grad_at, norms_at, *shape, stream, offset, codes_at, launch)


def octave_merge(into: Tensor, other: Tensor, key: Key, *, bits: int, offset: int = 0) -> None:
    """Replace codes by codes of the sums, at random, without bias; see ``hvc/octave.h``.

    A number that is 2**16 or more times smaller than the other is dropped.

    Args:
        offset: which element of the stream the first code is.
    """
    native, device, launch = backend(into)
    check_one_of("bits", bits, (4, 8))
    count = into.numel()
    into_at = checked("into", into, torch.uint8, count, device)
    other_at = checked("other", other, torch.uint8, count, device)
    check_apart("into", into, "other", other)
    stream = draw_stream(key, offset, count * 8 // bits)
    if REFERENCE:
        REFERENCE.octave_merge(into, other, key, bits=bits, offset=offset)
    else:
        native.octave_merge(into_at, other_at, count, bits, stream, offset, launch)


def octave_decode(
    codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, headroom: int, scale: float
) -> None:
    """Write ``(+-2 ** (headroom - e) * scale) * norm`` over ``grad``."""
    native, device, launch = backend(grad)
    count = grad.numel()
    dtype = dtype_code("grad", grad)
    check_octaves(bits, headroom)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    norms_at = checked("norms", norms, work_dtype(grad.dtype), row_count(count, row_length), device)
    codes_at = checked_codes(codes, bits, count, row_length, device)
    check_apart("codes", codes, "grad", grad)
    if REFERENCE:
        REFERENCE.octave_decode(codes, norms, row_length, grad, bits=bits, headroom=headroom, scale=scale)
    else:
        native.octave_decode(codes_at, norms_at, count, row_length, bits, headroom, scale, grad_at, dtype, launch)


# ---- plain numbers ----------------------------------------------------------------------------


def dense_offer(grad: Tensor, residual: Tensor | None, out: Tensor) -> int | Tensor:
    """Write ``grad + residual`` in the dtype of ``out``; return how many of these are not finite."""
    native, device, launch = backend(grad)
    count = grad.numel()
    code, out_code = dtype_code("grad", grad), dtype_code("out", out)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    out_at = checked("out", out, out.dtype, count, device)
    residual_at = 0
    if residual is not None:
        residual_at = checked("residual", residual, work_dtype(grad.dtype), count, device)
        check_apart("out", out, "residual", residual)
    check_apart("out", out, "grad", grad)
    if REFERENCE:
        return int(REFERENCE.dense_offer(grad, residual, out))
    counter, counter_at = counter_for(device)
    counted: int = native.dense_offer(grad_at, residual_at, code, count, out_at, out_code, counter_at, launch)
    return counted if counter is None else counter


def dense_add(into: Tensor, other: Tensor) -> None:
    """Add ``other`` to ``into``; 16-bit types add in float32 and round to nearest even."""
    native, device, launch = backend(into)
    count = into.numel()
    code = dtype_code("into", into)
    into_at = checked("into", into, into.dtype, count, device)
    other_at = checked("other", other, into.dtype, count, device)
    check_apart("into", into, "other", other)
    if REFERENCE:
        REFERENCE.dense_add(into, other)
    else:
        native.dense_add(into_at, other_at, code, count, launch)


def dense_decode(payload: Tensor, grad: Tensor, *, scale: float, residual: Tensor | None = None) -> None:
    """Write ``payload * scale`` over ``grad``; a residual, if given, becomes 0."""
    native, device, launch = backend(grad)
    count = grad.numel()
    code, grad_code = dtype_code("payload", payload), dtype_code("grad", grad)
    payload_at = checked("payload", payload, payload.dtype, count, device)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    check_apart("payload", payload, "grad", grad)
    residual_at = 0
    if residual is not None:
        residual_at = checked("residual", residual, work_dtype(grad.dtype), count, device)
        check_apart("residual", residual, "grad", grad)
        check_apart("residual", residual, "payload", payload)
    if REFERENCE:
        REFERENCE.dense_decode(payload, grad, scale=scale, residual=residual)
    else:
        native.dense_decode(payload_at, code, count, scale, grad_at, grad_code, residual_at, launch)


# ---- checking bytes ---------------------------------------------------------------------------


def crc32c(data: Tensor, crc: int = 0) -> int:
    """Return the CRC-32C of ``uint8`` data in host memory; pass the previous value to continue one."""
    count = data.numel()
    data_at = checked("data", data, torch.uint8, count, -1)
    return int(REFERENCE.crc32c(data, crc) if REFERENCE else CPU.crc32c(data_at, count, crc))


def crc32c_copy(dst: Tensor, src: Tensor, crc: int = 0) -> int:
    """Copy ``src`` to ``dst``, both in host memory, and return the CRC-32C of what was copied."""
    count = src.numel()
    src_at = checked("src", src, torch.uint8, count, -1)
    dst_at = checked("dst", dst, torch.uint8, count, -1)
    check_apart("dst", dst, "src", src)
    if REFERENCE:
        return int(REFERENCE.crc32c_copy(dst, src, crc))
    return int(CPU.crc32c_copy(dst_at, src_at, count, crc))


def hash64(data: Tensor, seed: int = 0) -> int:
    """Return a 64-bit hash of ``uint8`` data that any change within one 8-byte word changes.

    On CUDA this waits for the stream: the result is a number.
    """
    native, device, launch = backend(data)
    count = data.numel()
    data_at = checked("data", data, torch.uint8, count, device)
    return int(REFERENCE.hash64(data, seed) if REFERENCE else native.hash64(data_at, count, seed, launch))


# ---- for tests and benchmarks -----------------------------------------------------------------


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the Philox4x32-10 block of a counter and a key."""
    c0, c1, c2, c3 = (REFERENCE or CPU).philox4x32(counter, key)
    return c0, c1, c2, c3


def triad(a: Tensor, b: Tensor, c: Tensor, s: float) -> None:
    """Write ``b + s * c``, float32: the yardstick for memory bandwidth."""
    native, device, launch = backend(a)
    count = a.numel()
    at = [checked(n, t, torch.float32, count, device) for n, t in (("a", a), ("b", b), ("c", c))]
    if REFERENCE:
        REFERENCE.triad(a, b, c, s)
    else:
        native.triad(*at, s, count, launch)


def instruction_set() -> str:
    """Return what runtime dispatch chose: "avx512", "avx2", "generic" or "reference"."""
    return "reference" if REFERENCE else str(CPU.instruction_set())
