"""Kernels of methods that send single values: with their positions, or at places that all ranks draw alike.

Sections are laid out as ``rules/values.h`` says, samples drawn as ``rules/sample.h`` says. Positions are
``torch.int32``. Throughout, ``x = grad + residual`` in the dtype of the arithmetic: float64 for
float64 gradients, else float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .keys import Key
from .legality import (
    MAX_DRAWS,
    REFERENCE,
    backend,
    check_all_apart,
    check_factor,
    check_own,
    checked,
    checked_or_none,
    checked_room,
    checked_sections,
    counted,
    dtype_code,
    work_dtype,
)
from .sparse import ascended, check_elements, check_kept, check_parameter, golomb_bound, golomb_ranges

__all__ = ["sample_decode", "sample_offer", "values_bound", "values_decode", "values_encode"]

#: How values are sent: in the dtype of the arithmetic, in 16 bits, or as a sign of one mean.
FORMS = {"full": 0, "float16": 1, "bfloat16": 2, "signs": 3}


# ---- positions with values ----------------------------------------------------------------------


def values_bound(k: int, count: int, b: int, value_bytes: int, *, form: str = "full") -> int:
    """Return the most bytes that a section of at most ``k`` positions takes.

    Args:
        value_bytes: of the dtype of the arithmetic.
    """
    _check_form(form)
    ranges = golomb_ranges(count, b)
    positions = golomb_bound(k, count, b, 0) + 4 * ranges
    if form == "signs":
        return positions + value_bytes + (min(k, count) + 7 * min(k, ranges)) // 8
    return positions + min(k, count) * (value_bytes if form == "full" else 2)


def values_encode(
    positions: Tensor,
    kept: int,
    values: Tensor,
    b: int,
    elements: int,
    out: Tensor,
    *,
    form: str = "full",
    mean: Tensor | None = None,
) -> int:
    """Write the section of the first ``kept`` positions, which must ascend, and values; return its bytes.

    Waits for its stream on CUDA.

    Args:
        values: float32 or float64, one for each position; rounded to nearest even where the form is
            narrower, and to the largest number where that would be infinite.
        b: the parameter of the code, see :func:`golomb_parameter`.
        elements: how many elements the tensor has that the positions are in.
        out: uint8, at least :func:`values_bound` of them.
        mean: one element like the values, for "signs" only: what all of them count as.
    """
    native, device, launch = backend(positions)
    _check_form(form)
    check_kept(positions, kept, b, elements)
    if values.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"values must be float32 or float64, got {values.dtype}")
    if (form == "signs") != (mean is not None):
        raise ValueError(f'mean must be given for "signs" and no other form, got {form!r}')
    positions_at = checked("positions", positions, torch.int32, positions.numel(), device)
    values_at = checked("values", values, values.dtype, positions.numel(), device)
    mean_at = checked_or_none("mean", mean, values.dtype, 1, device)
    out_at = checked_room("out", out, values_bound(kept, elements, b, values.element_size(), form=form), device)
    check_all_apart({"out": out}, {"positions": positions, "values": values, "mean": mean})
    if REFERENCE:
        used = REFERENCE.values_encode(positions, kept, values, b, elements, out, form=form, mean=mean)
    else:
        shape = (dtype_code("values", values), FORMS[form], elements, b)
        used = native.values_encode(positions_at, kept, values_at, mean_at, *shape, out_at, launch)
    return ascended(used, elements)


def values_decode(
    sections: Sequence[Tensor],
    own: int,
    b: int,
    grad: Tensor,
    residual: Tensor | None,
    scale: float,
    *,
    form: str = "full",
    momentum: Tensor | None = None,
    factor: float = 0.0,
    masking: bool = True,
) -> int | Tensor:
    """Turn the sections of all ranks into the result, in place over ``grad``, and update the residual.

    ``grad`` becomes the sum of the sections, added in the order of the list, times ``scale``; the
    residual becomes ``x`` minus what section ``own`` says. With momentum, ``u = factor * momentum +
    grad`` is kept, the residual becomes ``x + factor * u``, and both are what is left where a value
    was sent: momentum 0 with masking, and the residual ``factor * u``. All in one pass.

    Args:
        sections: uint8; bytes behind the ranges of a section are ignored.
        form: with momentum "full", since nothing of ``x`` is left where it was sent.

    Returns:
        The number of malformed ranges of all sections, a tensor on CUDA. If it is not 0, what is
        overwritten holds anything.
    """
    native, device, launch = backend(grad)
    count, code, kind = grad.numel(), dtype_code("grad", grad), work_dtype(grad.dtype)
    _check_form(form)
    check_parameter(b)
    check_elements(count)
    sections_at = checked_sections(sections, device)
    check_own(own, sections)
    if momentum is not None and (residual is None or form != "full"):
        raise ValueError('momentum needs a residual and the form "full"')
    check_factor(momentum, factor)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = checked_or_none("residual", residual, kind, count, device)
    momentum_at = checked_or_none("momentum", momentum, kind, count, device)
    check_all_apart({"grad": grad, "residual": residual, "momentum": momentum}, {})
    if REFERENCE:
        options = {"form": form, "momentum": momentum, "factor": factor, "masking": masking}
        return int(REFERENCE.values_decode(sections, own, b, grad, residual, scale, **options))
    shape = (FORMS[form], b, code, count, float(scale))
    kept = (residual_at, momentum_at, float(factor), bool(masking))
    arguments = (sections_at, len(sections), own, *shape, grad_at, *kept)
    return counted(native.values_decode, arguments, device, launch)


def _check_form(form: str) -> None:
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")


# ---- samples ------------------------------------------------------------------------------------


def sample_offer(grad: Tensor, residual: Tensor | None, values: Tensor, key: Key, *, first: int = 0) -> int | Tensor:
    """Write ``x`` at one element of each of as many blocks as there are values; return how many of all are not finite.

    Args:
        values: in the dtype of the arithmetic; at least one if there are elements.
        key: names the random bits; ranks that are to choose alike must use the same one.
        first: which draw of that stream the first value's is.
    """
    native, device, launch = backend(grad)
    shape, words, at = _checked_sample(grad, residual, values, key, first, device)
    check_all_apart({"values": values}, {"grad": grad, "residual": residual})
    if REFERENCE:
        return int(REFERENCE.sample_offer(grad, residual, values, key, first=first))
    return counted(native.sample_offer, (*at, *shape, words, first, values.data_ptr()), device, launch)


def sample_decode(
    values: Tensor,
    grad: Tensor,
    residual: Tensor | None,
    key: Key,
    scale: float,
    *,
    first: int = 0,
    weighted: bool = False,
) -> None:
    """Write ``value * scale`` at the chosen elements of ``grad``, 0 elsewhere; the residual becomes ``x``, and 0 there.

    Args:
        weighted: multiply each value by the size of its block first, which makes the result unbiased.
    """
    native, device, launch = backend(grad)
    shape, words, at = _checked_sample(grad, residual, values, key, first, device)
    check_all_apart({"grad": grad, "residual": residual}, {"values": values})
    if REFERENCE:
        REFERENCE.sample_decode(values, grad, residual, key, scale, first=first, weighted=weighted)
    else:
        rule = (words, first, float(scale), bool(weighted))
        native.sample_decode(values.data_ptr(), *shape, *rule, *at, launch)


def _checked_sample(
    grad: Tensor, residual: Tensor | None, values: Tensor, key: Key, first: int, device: int
) -> tuple[tuple[int, int, int], tuple[int, int, int, int, int], tuple[int, int]]:
    """Return dtype, elements and blocks; the words of the key; and the addresses of gradient and residual."""
    count, k = grad.numel(), values.numel()
    code = dtype_code("grad", grad)
    check_elements(count)
    if not min(count, 1) <= k <= count:
        raise ValueError(f"values must hold {min(count, 1)} to {count} elements, one for each block, got {k}")
    if first < 0 or first + k > MAX_DRAWS // 2:
        raise ValueError(f"draws must lie in [0, {MAX_DRAWS // 2}), got {first} + {k}")
    checked("values", values, work_dtype(grad.dtype), k, device)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = checked_or_none("residual", residual, values.dtype, count, device)
    return (code, count, k), key.words(), (grad_at, residual_at)
