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
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from ..keys import Key
from . import loader

__all__ = [
    "bernoulli_words",
    "crc32c",
    "crc32c_copy",
    "dense_add",
    "dense_decode",
    "dense_offer",
    "hash64",
    "instruction_set",
    "majority_fold",
    "level_add",
    "level_decode",
    "level_encode",
    "merge_bits",
    "norm_offer",
    "octave_decode",
    "octave_encode",
    "octave_merge",
    "philox4x32",
    "sign_decode",
    "sign_offer",
    "sign_pack",
    "sign_unpack",
    "triad",
    "word_count",
]

Feedback = Literal["none", "global", "own"]

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_FEEDBACK = {"none": 0, "global": 1, "own": 2}
_MAX_PARTS = 65535
_MAX_WEIGHT = 1 << 62
_MAX_WORDS = 1 << 33  # the group index is 32 bits wide, and a group holds two words
_MAX_DRAWS = 1 << 35  # and a word 16 random bits for each of four elements
#: Powers of |x| that a norm may add up; 0 stands for the maximum.
POWERS = (0, 1, 2, 4)

_reference: ModuleType | None = None
if loader.choice() == "reference":
    from . import reference as _reference
else:
    _cpu = loader.load("_cpu")


@cache
def _cuda() -> ModuleType:
    if loader.choice():
        raise ValueError(f"HVC_KERNELS={loader.choice()} runs on CPU tensors only")
    return loader.load("_cuda")


def word_count(count: int) -> int:
    """Return how many 64-bit words hold ``count`` bits."""
    return (count + 63) >> 6


# ---- legality ---------------------------------------------------------------------------------


def _backend(tensor: Tensor) -> tuple[ModuleType, int, int]:
    """Return the module for a tensor, its device (-1 is the CPU), and how to launch there."""
    if tensor.is_cpu:
        return _reference or _cpu, -1, torch.get_num_threads()
    device = tensor.get_device()
    if not tensor.is_cuda or device != torch.cuda.current_device():
        raise ValueError(
            f"tensors must be on the CPU or the current CUDA device (torch.cuda.set_device "
            f"chooses it, for each thread), got one on {tensor.device}"
        )
    return _cuda(), device, torch.cuda.current_stream().cuda_stream


def _tensor(name: str, tensor: Tensor, dtype: torch.dtype, count: int, device: int) -> int:
    """Check one tensor and return its address."""
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of {count} elements, "
            f"got {tensor.dtype} with shape {tuple(tensor.shape)} and stride {tensor.stride()}"
        )
    if not (tensor.is_cpu if device < 0 else tensor.is_cuda and tensor.get_device() == device):
        expected = "the CPU" if device < 0 else f"cuda:{device}"
        raise ValueError(f"{name} must be on {expected}, got a tensor on {tensor.device}")
    return tensor.data_ptr()


def _counter(device: int) -> tuple[Tensor | None, int]:
    """Return where a CUDA kernel puts a count, and the address; the CPU returns its counts."""
    if device < 0:
        return None, 0
    counter = torch.empty(1, dtype=torch.int64, device=f"cuda:{device}")
    return counter, counter.data_ptr()


def _number(name: str, tensor: Tensor) -> int:
    """Return the code of a floating-point dtype."""
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} must be float32, float64, float16 or bfloat16, got {tensor.dtype}")
    return code


def _work(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic, and so of a residual."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _apart(name: str, first: Tensor, other_name: str, second: Tensor) -> None:
    """Refuse two tensors that share memory."""
    a, b = first.data_ptr(), second.data_ptr()
    if a < b + second.nbytes and b < a + first.nbytes:
        raise ValueError(f"{name} and {other_name} must not overlap")


def _rows(count: int, row_length: int) -> int:
    if row_length < 1:
        raise ValueError(f"row_length must be at least 1, got {row_length}")
    return -(-count // row_length)


def _words(key: Key | None, word_offset: int, words: int) -> tuple[int, int, int, int, int] | None:
    if word_offset < 0 or word_offset + words > _MAX_WORDS:
        raise ValueError(f"words must lie in [0, {_MAX_WORDS}), got {word_offset} + {words}")
    return None if key is None else key.words()


def _odds(numerator: int, denominator: int) -> None:
    if not (0 <= numerator <= denominator and 0 < denominator <= _MAX_WEIGHT):
        raise ValueError(
            f"a probability must be numerator / denominator with 0 <= numerator <= denominator "
            f"and 1 <= denominator <= {_MAX_WEIGHT}, got {numerator} / {denominator}"
        )


def _draws(key: Key, offset: int, count: int) -> tuple[int, int, int, int, int]:
    if offset < 0 or offset + count > _MAX_DRAWS:
        raise ValueError(f"elements must lie in [0, {_MAX_DRAWS}), got {offset} + {count}")
    return key.words()


def _one_of(name: str, value: int, allowed: tuple[int, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def _codes(codes: Tensor, bits: int, count: int, row_length: int, device: int) -> int:
    """Check the codes of ``count`` elements and return their address."""
    if bits == 4 and row_length % 2 and row_length < count:
        raise ValueError(f"row_length must be even where two codes share a byte, got {row_length}")
    return _tensor("codes", codes, *code_layout(bits, count), device)


def code_layout(bits: int, count: int) -> tuple[torch.dtype, int]:
    """Return the dtype and the length of the array that holds ``count`` codes."""
    if bits == 4:
        return torch.uint8, (count + 1) // 2
    return (torch.int16 if bits == 16 else torch.uint8), count


# ---- one bit per element ----------------------------------------------------------------------


def sign_pack(x: Tensor, bits: Tensor) -> None:
    """Write one bit per element: ``x >= 0``, so -0.0 gives 1 and NaN gives 0."""
    native, device, launch = _backend(x)
    count = x.numel()
    code = _number("x", x)
    x_at = _tensor("x", x, x.dtype, count, device)
    bits_at = _tensor("bits", bits, torch.int64, word_count(count), device)
    if _reference:
        _reference.sign_pack(x, bits)
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
        The number of elements of ``x`` that are not finite.
    """
    native, device, launch = _backend(grad)
    count = grad.numel()
    words = word_count(count)
    code = _number("grad", grad)
    rows = _rows(count, row_length)
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    bits_at = _tensor("bits", bits, torch.int64, words, device)
    residual_at = sums_at = 0
    if residual is not None:
        residual_at = _tensor("residual", residual, _work(grad.dtype), count, device)
    if sums is not None:
        sums_at = _tensor("sums", sums, torch.float64, rows, device)
    stream = _words(key, word_offset, words)
    if _reference:
        options = {"key": key, "word_offset": word_offset}
        return int(_reference.sign_offer(grad, residual, bits, sums, row_length, **options))
    counter, counter_at = _counter(device)
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
    "none" keeps nothing. What is kept is multiplied by ``decay``. Then ``grad = G * scale``.

    Args:
        steps: float32, one per ``row_length`` elements.
    """
    native, device, launch = _backend(grad)
    count = grad.numel()
    words = word_count(count)
    code = _number("grad", grad)
    rule = _FEEDBACK.get(feedback)
    if rule is None or (rule == 0) != (residual is None):
        raise ValueError(
            f'feedback must be "global" or "own" with a residual, or "none" with residual None, '
            f"got {feedback!r} with {'no' if residual is None else 'a'} residual"
        )
    rows = _rows(count, row_length)
    bits_at = _tensor("bits", bits, torch.int64, words, device)
    steps_at = _tensor("steps", steps, torch.float32, rows, device)
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    residual_at = 0
    if residual is not None:
        residual_at = _tensor("residual", residual, _work(grad.dtype), count, device)
        _apart("residual", residual, "grad", grad)
    stream = _words(key, word_offset, words)
    if _reference:
        options = {"feedback": feedback, "decay": decay, "scale": scale, "key": key, "word_offset": word_offset}
        _reference.sign_decode(bits, steps, row_length, grad, residual, **options)
    else:
        shape = (code, count, row_length)
        rules = (rule, decay, scale, stream, word_offset)
        native.sign_decode(bits_at, steps_at, *shape, *rules, grad_at, residual_at, launch)


def sign_unpack(bits: Tensor, steps: Tensor, row_length: int, out: Tensor, *, scale: float = 1.0) -> None:
    """Write ``+-steps[row] * scale``."""
    native, device, launch = _backend(out)
    count = out.numel()
    code = _number("out", out)
    bits_at = _tensor("bits", bits, torch.int64, word_count(count), device)
    steps_at = _tensor("steps", steps, torch.float32, _rows(count, row_length), device)
    out_at = _tensor("out", out, out.dtype, count, device)
    if _reference:
        _reference.sign_unpack(bits, steps, row_length, out, scale=scale)
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
    native, device, launch = _backend(into)
    words = into.numel()
    total = weight_into + weight_other
    _odds(weight_other, total)
    into_at = _tensor("into", into, torch.int64, words, device)
    other_at = _tensor("other", other, torch.int64, words, device)
    _apart("into", into, "other", other)
    stream = _words(key, word_offset, words)
    if _reference:
        _reference.merge_bits(into, other, weight_into, weight_other, key, word_offset=word_offset)
    else:
        native.merge_bits(into_at, other_at, words, weight_other, total, stream, word_offset, launch)


def bernoulli_words(out: Tensor, numerator: int, denominator: int, key: Key, *, word_offset: int = 0) -> None:
    """Draw bits that are 1 with probability ``numerator / denominator``, exact to 2**-64."""
    native, device, launch = _backend(out)
    words = out.numel()
    _odds(numerator, denominator)
    out_at = _tensor("out", out, torch.int64, words, device)
    stream = _words(key, word_offset, words)
    if _reference:
        _reference.bernoulli_words(out, numerator, denominator, key, word_offset=word_offset)
    else:
        native.bernoulli_words(out_at, words, numerator, denominator, stream, word_offset, launch)


def majority_fold(parts: Sequence[Tensor], out: Tensor, count: int) -> None:
    """Write 1 where at least half of the parts hold 1, for ``count`` bits; may run in place."""
    if not 1 <= len(parts) <= _MAX_PARTS:
        raise ValueError(f"parts must hold 1 to {_MAX_PARTS} tensors, got {len(parts)}")
    native, device, launch = _backend(out)
    words = word_count(count)
    out_at = _tensor("out", out, torch.int64, words, device)
    parts_at = [_tensor(f"parts[{i}]", part, torch.int64, words, device) for i, part in enumerate(parts)]
    if _reference:
        _reference.majority_fold(parts, out, count)
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
    native, device, launch = _backend(grad)
    count = grad.numel()
    code = _number("grad", grad)
    rows = _rows(count, row_length)
    _one_of("power", power, POWERS)
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    norms_at = _tensor("norms", norms, torch.float64 if power else _work(grad.dtype), rows, device)
    _apart("norms", norms, "grad", grad)
    if _reference:
        return int(_reference.norm_offer(grad, norms, row_length, power=power))
    counter, counter_at = _counter(device)
    counted: int = native.norm_offer(grad_at, code, count, row_length, power, norms_at, counter_at, launch)
    return counted if counter is None else counter


def level_encode(
    grad: Tensor, norms: Tensor, row_length: int, codes: Tensor, key: Key, *, bits: int, levels: int, offset: int = 0
) -> None:
    """Round ``grad / norm * levels`` to a whole number, up or down at random, without bias.

    16 random bits decide: the probability is right to 2**-17, and a whole number stays what it is.

    Args:
        norms: float32 (float64 for float64 gradients), one per ``row_length`` elements, no less
            than any magnitude there; 0 gives codes 0.
        codes: see :func:`code_layout`.
        levels: the code of the norm, below ``2 ** (bits - 1)``.
        offset: which element of the stream ``grad[0]`` is.
    """
    native, device, launch = _backend(grad)
    count = grad.numel()
    dtype = _number("grad", grad)
    _one_of("bits", bits, (4, 8, 16))
    if not 1 <= levels < 1 << (bits - 1):
        raise ValueError(f"levels must be in [1, {1 << (bits - 1)}), got {levels}")
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    norms_at = _tensor("norms", norms, _work(grad.dtype), _rows(count, row_length), device)
    codes_at = _codes(codes, bits, count, row_length, device)
    _apart("codes", codes, "grad", grad)
    stream = _draws(key, offset, count)
    if _reference:
        _reference.level_encode(grad, norms, row_length, codes, key, bits=bits, levels=levels, offset=offset)
    else:
        shape = (dtype, count, row_length, bits, levels)
        native.level_encode(grad_at, norms_at, *shape, stream, offset, codes_at, launch)


def level_add(into: Tensor, other: Tensor, *, bits: int) -> None:
    """Add codes of :func:`level_encode`, each modulo ``2 ** bits``; none carries into its neighbour."""
    native, device, launch = _backend(into)
    _one_of("bits", bits, (4, 8, 16))
    dtype, count = code_layout(16 if bits == 16 else 8, into.numel())
    into_at = _tensor("into", into, dtype, count, device)
    other_at = _tensor("other", other, dtype, count, device)
    _apart("into", into, "other", other)
    if _reference:
        _reference.level_add(into, other, bits=bits)
    else:
        native.level_add(into_at, other_at, count, bits, launch)


def level_decode(
    codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, scale: float
) -> None:
    """Write ``(code * scale) * norm`` over ``grad``."""
    native, device, launch = _backend(grad)
    count = grad.numel()
    dtype = _number("grad", grad)
    _one_of("bits", bits, (4, 8, 16))
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    norms_at = _tensor("norms", norms, _work(grad.dtype), _rows(count, row_length), device)
    codes_at = _codes(codes, bits, count, row_length, device)
    _apart("codes", codes, "grad", grad)
    if _reference:
        _reference.level_decode(codes, norms, row_length, grad, bits=bits, scale=scale)
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
    native, device, launch = _backend(grad)
    count = grad.numel()
    dtype = _number("grad", grad)
    _octaves(bits, headroom)
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    norms_at = _tensor("norms", norms, _work(grad.dtype), _rows(count, row_length), device)
    codes_at = _codes(codes, bits, count, row_length, device)
    _apart("codes", codes, "grad", grad)
    stream = _draws(key, offset, count)
    if _reference:
        _reference.octave_encode(grad, norms, row_length, codes, key, bits=bits, headroom=headroom, offset=offset)
    else:
        shape = (dtype, count, row_length, bits, headroom)
        native.octave_encode(grad_at, norms_at, *shape, stream, offset, codes_at, launch)


def octave_merge(into: Tensor, other: Tensor, key: Key, *, bits: int, offset: int = 0) -> None:
    """Replace codes by codes of the sums, at random, without bias; see ``hvc/octave.h``.

    A number that is 2**16 or more times smaller than the other is dropped.

    Args:
        offset: which element of the stream the first code is.
    """
    native, device, launch = _backend(into)
    _one_of("bits", bits, (4, 8))
    count = into.numel()
    into_at = _tensor("into", into, torch.uint8, count, device)
    other_at = _tensor("other", other, torch.uint8, count, device)
    _apart("into", into, "other", other)
    stream = _draws(key, offset, count * 8 // bits)
    if _reference:
        _reference.octave_merge(into, other, key, bits=bits, offset=offset)
    else:
        native.octave_merge(into_at, other_at, count, bits, stream, offset, launch)


def octave_decode(
    codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, headroom: int, scale: float
) -> None:
    """Write ``(+-2 ** (headroom - e) * scale) * norm`` over ``grad``."""
    native, device, launch = _backend(grad)
    count = grad.numel()
    dtype = _number("grad", grad)
    _octaves(bits, headroom)
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    norms_at = _tensor("norms", norms, _work(grad.dtype), _rows(count, row_length), device)
    codes_at = _codes(codes, bits, count, row_length, device)
    _apart("codes", codes, "grad", grad)
    if _reference:
        _reference.octave_decode(codes, norms, row_length, grad, bits=bits, headroom=headroom, scale=scale)
    else:
        native.octave_decode(codes_at, norms_at, count, row_length, bits, headroom, scale, grad_at, dtype, launch)


def _octaves(bits: int, headroom: int) -> None:
    _one_of("bits", bits, (4, 8))
    most = min(1 << (bits - 1), 32) - 1
    if not 1 <= headroom <= most:
        raise ValueError(f"headroom must be in [1, {most}], got {headroom}")


# ---- plain numbers ----------------------------------------------------------------------------


def dense_offer(grad: Tensor, residual: Tensor | None, out: Tensor) -> int | Tensor:
    """Write ``grad + residual`` in the dtype of ``out``; return how many of these are not finite."""
    native, device, launch = _backend(grad)
    count = grad.numel()
    code, out_code = _number("grad", grad), _number("out", out)
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    out_at = _tensor("out", out, out.dtype, count, device)
    residual_at = 0
    if residual is not None:
        residual_at = _tensor("residual", residual, _work(grad.dtype), count, device)
        _apart("out", out, "residual", residual)
    _apart("out", out, "grad", grad)
    if _reference:
        return int(_reference.dense_offer(grad, residual, out))
    counter, counter_at = _counter(device)
    counted: int = native.dense_offer(grad_at, residual_at, code, count, out_at, out_code, counter_at, launch)
    return counted if counter is None else counter


def dense_add(into: Tensor, other: Tensor) -> None:
    """Add ``other`` to ``into``; 16-bit types add in float32 and round to nearest even."""
    native, device, launch = _backend(into)
    count = into.numel()
    code = _number("into", into)
    into_at = _tensor("into", into, into.dtype, count, device)
    other_at = _tensor("other", other, into.dtype, count, device)
    _apart("into", into, "other", other)
    if _reference:
        _reference.dense_add(into, other)
    else:
        native.dense_add(into_at, other_at, code, count, launch)


def dense_decode(payload: Tensor, grad: Tensor, *, scale: float, residual: Tensor | None = None) -> None:
    """Write ``payload * scale`` over ``grad``; a residual, if given, becomes 0."""
    native, device, launch = _backend(grad)
    count = grad.numel()
    code, grad_code = _number("payload", payload), _number("grad", grad)
    payload_at = _tensor("payload", payload, payload.dtype, count, device)
    grad_at = _tensor("grad", grad, grad.dtype, count, device)
    _apart("payload", payload, "grad", grad)
    residual_at = 0
    if residual is not None:
        residual_at = _tensor("residual", residual, _work(grad.dtype), count, device)
        _apart("residual", residual, "grad", grad)
        _apart("residual", residual, "payload", payload)
    if _reference:
        _reference.dense_decode(payload, grad, scale=scale, residual=residual)
    else:
        native.dense_decode(payload_at, code, count, scale, grad_at, grad_code, residual_at, launch)


# ---- checking bytes ---------------------------------------------------------------------------


def crc32c(data: Tensor, crc: int = 0) -> int:
    """Return the CRC-32C of ``uint8`` data in host memory; pass the previous value to continue one."""
    count = data.numel()
    data_at = _tensor("data", data, torch.uint8, count, -1)
    return int(_reference.crc32c(data, crc) if _reference else _cpu.crc32c(data_at, count, crc))


def crc32c_copy(dst: Tensor, src: Tensor, crc: int = 0) -> int:
    """Copy ``src`` to ``dst``, both in host memory, and return the CRC-32C of what was copied."""
    count = src.numel()
    src_at = _tensor("src", src, torch.uint8, count, -1)
    dst_at = _tensor("dst", dst, torch.uint8, count, -1)
    _apart("dst", dst, "src", src)
    if _reference:
        return int(_reference.crc32c_copy(dst, src, crc))
    return int(_cpu.crc32c_copy(dst_at, src_at, count, crc))


def hash64(data: Tensor, seed: int = 0) -> int:
    """Return a 64-bit hash of ``uint8`` data that any change within one 8-byte word changes.

    On CUDA this waits for the stream: the result is a number.
    """
    native, device, launch = _backend(data)
    count = data.numel()
    data_at = _tensor("data", data, torch.uint8, count, device)
    return int(_reference.hash64(data, seed) if _reference else native.hash64(data_at, count, seed, launch))


# ---- for tests and benchmarks -----------------------------------------------------------------


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the Philox4x32-10 block of a counter and a key."""
    c0, c1, c2, c3 = (_reference or _cpu).philox4x32(counter, key)
    return c0, c1, c2, c3


def triad(a: Tensor, b: Tensor, c: Tensor, s: float) -> None:
    """Write ``b + s * c``, float32: the yardstick for memory bandwidth."""
    native, device, launch = _backend(a)
    count = a.numel()
    at = [_tensor(n, t, torch.float32, count, device) for n, t in (("a", a), ("b", b), ("c", c))]
    if _reference:
        _reference.triad(a, b, c, s)
    else:
        native.triad(*at, s, count, launch)


def instruction_set() -> str:
    """Return what runtime dispatch chose: "avx512", "avx2", "generic" or "reference"."""
    return "reference" if _reference else str(_cpu.instruction_set())
