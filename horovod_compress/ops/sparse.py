"""Kernels of Sparse Binary Compression (arXiv:1805.08768) and of exact top-k selection.

Positions are ``torch.int32``. Throughout, ``x = grad + residual`` in the dtype of the arithmetic:
float64 for float64 gradients, else float32. Sections are laid out as ``rules/golomb.h`` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dithering import norm_offer
from .legality import (
    REFERENCE,
    backend,
    check_all_apart,
    check_apart,
    check_own,
    checked,
    checked_bytes,
    checked_or_none,
    checked_room,
    checked_sections,
    counted,
    dtype_code,
    work_dtype,
)

__all__ = [
    "binary_clear",
    "binary_decode",
    "binary_encode",
    "binary_select",
    "count_nonfinite",
    "golomb_bound",
    "golomb_parameter",
    "top_select",
]

MAX_ELEMENTS = (1 << 31) - 1  # positions are 32 bits wide
MAX_PARAMETER = 20
MAX_STREAM = (1 << 32) - 1  # bytes of a range, counted in 32 bits

# ---- selection --------------------------------------------------------------------------------


def top_select(grad: Tensor, residual: Tensor | None, k: int, positions: Tensor, values: Tensor) -> tuple[int, int]:
    """Write the ``k`` elements of largest ``|x|``, in ascending order of their positions.

    Among equals the lower position is taken; zeros and NaN never are. On CUDA this waits for the
    stream: the results are numbers.

    Args:
        positions: int32, ``k`` of them; entries behind those found are left alone.
        values: ``x`` there, in the dtype of the arithmetic.

    Returns:
        How many were found, fewer than ``k`` if fewer are not 0; and how many elements of ``x``
        are not finite.
    """
    native, device, launch = backend(grad)
    given = _checked_selection(grad, residual, k, device)
    positions_at = checked("positions", positions, torch.int32, k, device)
    values_at = checked("values", values, work_dtype(grad.dtype), k, device)
    check_all_apart({"positions": positions, "values": values}, {"grad": grad, "residual": residual})
    if REFERENCE:
        return REFERENCE.top_select(grad, residual, k, positions, values)
    kept, nonfinite = native.top_select(*given, k, positions_at, values_at, launch)
    return int(kept), int(nonfinite)


def binary_select(grad: Tensor, residual: Tensor | None, k: int, positions: Tensor, mean: Tensor) -> tuple[int, int]:
    """Write the positions of the ``k`` largest or the ``k`` most negative elements, and their mean.

    The side is chosen whose mean, put in their place, removes more of the squared error: of two
    complete sides the one with the larger mean. Ties, zeros, NaN and CUDA as in :func:`top_select`.

    Args:
        positions: int32, ``k`` of them; entries behind those found are left alone.
        mean: one element in the dtype of the arithmetic, with its sign; 0 if nothing was found.

    Returns:
        How many positions were written, and how many elements of ``x`` are not finite. The mean of
        float64 elements that are may still be infinite.
    """
    native, device, launch = backend(grad)
    given = _checked_selection(grad, residual, k, device)
    positions_at = checked("positions", positions, torch.int32, k, device)
    mean_at = checked("mean", mean, work_dtype(grad.dtype), 1, device)
    check_all_apart({"positions": positions, "mean": mean}, {"grad": grad, "residual": residual})
    if REFERENCE:
        return REFERENCE.binary_select(grad, residual, k, positions, mean)
    kept, nonfinite = native.binary_select(*given, k, positions_at, mean_at, launch)
    return int(kept), int(nonfinite)


def _checked_selection(grad: Tensor, residual: Tensor | None, k: int, device: int) -> tuple[int, int, int, int]:
    """Return addresses, dtype and length of what is selected from."""
    count = grad.numel()
    code = dtype_code("grad", grad)
    check_elements(count)
    if not 0 <= k <= count:
        raise ValueError(f"k must be in [0, {count}], the number of elements, got {k}")
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = checked_or_none("residual", residual, work_dtype(grad.dtype), count, device)
    return grad_at, residual_at, code, count


def count_nonfinite(grad: Tensor) -> int | Tensor:
    """Return how many elements are not finite."""
    count = grad.numel()
    return norm_offer(grad, grad.new_empty(min(count, 1), dtype=work_dtype(grad.dtype)), max(count, 1))


# ---- Golomb codes -----------------------------------------------------------------------------


def golomb_parameter(k: int, count: int) -> int:
    """Return the parameter that codes ``k`` positions among ``count`` elements in the fewest bits.

    That is ``1 + floor(log2(log((sqrt(5) - 1) / 2) / log(1 - k / count)))`` within [0, 20]: the
    number of ``j >= 0`` for which ``q = (1 - k / count) ** 2 ** j`` is at least
    ``(sqrt(5) - 1) / 2``, or ``q * q + q >= 1``. Integers decide, so that all ranks agree.
    """
    if not 0 <= k <= count:
        raise ValueError(f"k must be in [0, {count}], the number of elements, got {k}")
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


def binary_encode(positions: Tensor, kept: int, mean: Tensor, b: int, elements: int, out: Tensor) -> int:
    """Write the section of the first ``kept`` positions, which must ascend; return its bytes.

    On CUDA this waits for the stream: the result is a number.

    Args:
        mean: one element, float32 or float64, as :func:`binary_select` writes it.
        b: the parameter of the code, see :func:`golomb_parameter`.
        elements: how many elements the tensor has that the positions are in.
        out: uint8, at least :func:`golomb_bound` of them.
    """
    native, device, launch = backend(positions)
    check_kept(positions, kept, b, elements)
    if mean.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"mean must be float32 or float64, got {mean.dtype}")
    _check_stream(kept, b)
    positions_at = checked("positions", positions, torch.int32, positions.numel(), device)
    mean_at = checked("mean", mean, mean.dtype, 1, device)
    out_at = checked_room("out", out, golomb_bound(kept, elements, b, mean.element_size()), device)
    check_all_apart({"out": out}, {"positions": positions, "mean": mean})
    if REFERENCE:
        used = REFERENCE.binary_encode(positions, kept, mean, b, elements, out)
    else:
        value_bytes = mean.element_size()
        used = native.binary_encode(positions_at, kept, mean_at, value_bytes, elements, b, out_at, launch)
    return ascended(used, elements)


def check_kept(positions: Tensor, kept: int, b: int, elements: int) -> None:
    """Refuse to code the first ``kept`` positions where there are not so many, or the code cannot hold them."""
    check_parameter(b)
    check_elements(elements)
    if not 0 <= kept <= min(positions.numel(), elements):
        raise ValueError(f"kept must be in [0, {min(positions.numel(), elements)}], got {kept}")


def ascended(used: int, elements: int) -> int:
    """Return the bytes of a section, unless its positions could not be coded."""
    if used < 0:
        raise ValueError(f"positions must ascend and be below {elements}, the number of elements")
    return int(used)


def binary_decode(
    sections: Sequence[Tensor], own: int, b: int, grad: Tensor, residual: Tensor | None, scale: float
) -> int | Tensor:
    """Turn the sections of all ranks into the result, in place over ``grad``, and update the residual.

    ``grad`` becomes the sum of the sections, added in the order of the list, times ``scale``; the
    residual becomes ``x`` minus what section ``own`` says. Both in one pass.

    Args:
        sections: uint8; bytes behind the streams of a section are ignored.

    Returns:
        The number of malformed ranges of all sections, a tensor on CUDA. If it is not 0, ``grad``
        and ``residual`` hold anything.
    """
    native, device, launch = backend(grad)
    count = grad.numel()
    code = dtype_code("grad", grad)
    check_parameter(b)
    check_elements(count)
    sections_at = checked_sections(sections, device)
    check_own(own, sections)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = checked_or_none("residual", residual, work_dtype(grad.dtype), count, device)
    named = {f"sections[{i}]": section for i, section in enumerate(sections)}
    check_all_apart({"grad": grad, "residual": residual}, named)
    if REFERENCE:
        return REFERENCE.binary_decode(sections, own, b, grad, residual, scale)
    arguments = (sections_at, len(sections), own, b, code, count, scale, grad_at, residual_at)
    return counted(native.binary_decode, arguments, device, launch)


def binary_clear(section: Tensor, b: int, tensor: Tensor) -> int | Tensor:
    """Write 0 at the positions of a section; return the number of its malformed ranges.

    The section is one of gradients with the same dtype of the arithmetic as ``tensor``.
    """
    native, device, launch = backend(tensor)
    count = tensor.numel()
    code = dtype_code("tensor", tensor)
    check_parameter(b)
    check_elements(count)
    tensor_at = checked("tensor", tensor, tensor.dtype, count, device)
    section_at = checked_bytes("section", section, device)
    check_apart("tensor", tensor, "section", section)
    if REFERENCE:
        return REFERENCE.binary_clear(section, b, tensor)
    return counted(native.binary_clear, ([section_at], b, code, count, tensor_at), device, launch)


def _check_stream(kept: int, b: int) -> None:
    """Refuse what could give a range a stream whose length does not fit in 32 bits."""
    bits = min(kept, 1 << b + 11) * (1 + b) + 2047
    if bits > 8 * MAX_STREAM:
        raise ValueError(f"kept must be small enough for streams of at most {MAX_STREAM} bytes, got {kept} with b {b}")


def check_parameter(b: int) -> None:
    """Refuse a parameter of the code that no kernel takes."""
    if not 0 <= b <= MAX_PARAMETER:
        raise ValueError(f"b must be in [0, {MAX_PARAMETER}], got {b}")


def check_elements(count: int) -> None:
    """Refuse a tensor whose positions do not fit in 32 bits."""
    if count > MAX_ELEMENTS:
        raise ValueError(f"a tensor must have at most {MAX_ELEMENTS} elements, got {count}")
