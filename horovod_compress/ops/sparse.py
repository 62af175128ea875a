"""The operations on some elements only: exact selection, their positions and values in sections, and samples.

Positions are ``torch.int32``. Throughout, ``x = grad + residual`` in the dtype of the arithmetic: float64 for float64
gradients, else float32. Sections of Sparse Binary Compression (arXiv:1805.08768) are laid out as ``rules/golomb.h``
says, those with values as ``rules/values.h`` says; samples are drawn as ``rules/sample.h`` says.

What a selection finds, and where sections end, is written to arrays, so that nothing waits on CUDA. Whoever works on
several tensors reads these numbers once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .dispatch import Counts, run
from .keys import Key
from .legality import check_factor, check_one_of
from .sizes import CODE_BITS, FORMS

__all__ = [
    "binary_clear",
    "binary_decode_all",
    "binary_encode_all",
    "binary_select_all",
    "chunk_select_all",
    "codebook_fit",
    "sample_decode",
    "sample_offer",
    "selected",
    "top_select_all",
    "values_decode_all",
    "values_encode_all",
]


# ---- selection ----------------------------------------------------------------------------------


def top_select_all(
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    ks: Sequence[int],
    positions: Sequence[Tensor],
    values: Sequence[Tensor],
    numbers: Sequence[Tensor],
    *,
    whole: bool = False,
) -> None:
    """Write the ``k`` elements of largest ``|x|`` of each tensor, in ascending order of their positions.

    Among equals the lower position is taken; zeros and NaN never are.

    Args:
        positions: int32, ``k`` of them; entries after those found are left alone.
        values: ``x`` there, in the dtype of the arithmetic.
        numbers: int64, three. How many were found, fewer than ``k`` if fewer are not 0; how many elements of ``x``
            are not finite; and 1 if a sample has misled, on CUDA: then nothing else that was written counts.
        whole: take no sample, which may cost time.
    """
    run.top_select(grads, residuals, ks, positions, values, numbers, whole)


def binary_select_all(
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    ks: Sequence[int],
    positions: Sequence[Tensor],
    means: Sequence[Tensor],
    numbers: Sequence[Tensor],
    *,
    whole: bool = False,
) -> None:
    """Write the positions of the ``k`` largest or the ``k`` most negative elements of each tensor, and their mean.

    The side is chosen whose mean, put in their place, removes more of the squared error: of two
    complete sides the one with the larger mean. Ties, zeros, NaN and samples as in :func:`top_select_all`.

    Args:
        positions: int32, ``k`` of them; entries after those found are left alone.
        means: one element in the dtype of the arithmetic, with its sign; 0 if nothing was found. That of
            float64 elements that are finite may still be infinite.
        numbers: as in :func:`top_select_all`.
    """
    run.binary_select(grads, residuals, ks, positions, means, numbers, whole)


def chunk_select_all(
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    lasts: Sequence[int],
    positions: Sequence[Tensor],
    values: Sequence[Tensor],
    numbers: Sequence[Tensor],
    *,
    chunk: int,
    k: int,
    whole: bool = False,
) -> None:
    """Write the ``k`` elements of largest ``|x|`` of each chunk, in ascending order of their positions.

    Ties, zeros and NaN as in :func:`top_select_all`.

    Args:
        lasts: how many are chosen of a last chunk that is shorter, if there is one.
        positions: int32, as many as are chosen; entries after those found hold anything.
        values: likewise, ``x`` there, in the dtype of the arithmetic.
        numbers: as in :func:`top_select_all`; no sample is taken.
        chunk: how many consecutive elements are one, at most 4096.
        whole: makes no difference.
    """
    run.chunk_select(grads, residuals, lasts, positions, values, numbers, chunk, k)


def selected(
    select: Callable[..., None], given: Sequence[Sequence[Any] | None], numbers: Sequence[Tensor]
) -> list[tuple[int, int]]:
    """Read what a selection from several tensors has found, and repeat it for those that a sample has misled.

    Waits once on CUDA; twice if there are such.

    Args:
        select: :func:`top_select_all`, :func:`chunk_select_all` or :func:`binary_select_all`.
        given: the columns that it was given, but for the numbers.
        numbers: these.

    Returns:
        Of each tensor how many were found, and how many elements of ``x`` are not finite.
    """
    rows = torch.stack([*numbers]).tolist() if numbers else []
    misled = [index for index, row in enumerate(rows) if row[2]]
    if misled:
        columns = [column and [column[index] for index in misled] for column in given]
        select(*columns, [numbers[index] for index in misled], whole=True)
        rows = torch.stack([*numbers]).tolist()
    return [(kept, nonfinite) for kept, nonfinite, _ in rows]


# ---- positions ----------------------------------------------------------------------------------


def binary_encode_all(
    positions: Sequence[Tensor],
    kept: Sequence[int],
    means: Sequence[Tensor],
    parameters: Sequence[int],
    elements: Sequence[int],
    ends: Tensor,
    out: Tensor,
) -> None:
    """Write the sections of the first ``kept`` positions of tensors, which must ascend, one after the other.

    Args:
        means: one element of each, float32 or float64, as :func:`binary_select_all` writes it.
        parameters: of the code, see :func:`.sizes.golomb_parameter`.
        elements: how many elements each tensor has that the positions are in.
        ends: int64, one more than tensors: where the first section begins in ``out``; and where each ends, which is
            written. That is -1 on CUDA, and an error is raised on the CPU, if the positions do not ascend or there is
            no room. A section that begins at such a -1 is not written.
        out: uint8, from there on at least :func:`.sizes.golomb_bound` of them for each tensor.
    """
    run.binary_encode(positions, kept, means, elements, parameters, ends, out)
    _ascended(ends, elements)


def binary_decode_all(
    sections: Sequence[Sequence[Tensor]],
    own: int,
    parameters: Sequence[int],
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    scale: float,
) -> Counts:
    """Turn the sections of all ranks into the results, in place over the gradients, and update the residuals.

    ``grad`` becomes the sum of the sections, added in the order of the list, times ``scale``; the
    residual becomes ``x`` minus what section ``own`` says. Both in one pass.

    Args:
        sections: of each tensor those of all ranks, uint8; bytes after the streams of a section are ignored.

    Returns:
        The number of malformed ranges of all sections of each tensor. If one is not 0, its gradient and residual hold
        anything.
    """
    return run.binary_decode(parameters, grads, residuals, _of_ranks(sections, len(grads)), own, scale)


def binary_clear(section: Tensor, b: int, tensor: Tensor) -> int | Tensor:
    """Write 0 at the positions of a section; return the number of its malformed ranges.

    The section is one of gradients with the same dtype of the arithmetic as ``tensor``.
    """
    return run.binary_clear(section, tensor, b)


def _of_ranks(sections: Sequence[Sequence[Tensor]], number: int) -> list[Tensor]:
    """Return the sections of so many tensors in one list, if there are as many of each."""
    if len(sections) != number:  # in one list, those of fewer tensors could pass for those of fewer ranks
        raise ValueError(f"sections must hold one list for each of {number} tensors, got {len(sections)}")
    ranks = {len(of_tensor) for of_tensor in sections}
    if len(ranks) > 1:
        raise ValueError(f"sections must be of as many ranks for every tensor, got {sorted(ranks)}")
    return [section for of_tensor in sections for section in of_tensor]


def _ascended(ends: Tensor, elements: Sequence[int]) -> None:
    """Refuse sections that could not be written, where the host knows."""
    if not (ends.is_cpu and len(ends) == len(elements) + 1 and ends[-1] < 0):
        return
    if ends[0] < 0:
        raise ValueError(f"ends[0] must say where in out the first section begins, got {int(ends[0])}")
    wrong = int((ends < 0).nonzero()[0]) - 1
    raise ValueError(
        f"positions must ascend and be below {elements[wrong]}, the number of elements, but positions[{wrong}] do not"
    )


# ---- positions with values ----------------------------------------------------------------------


def codebook_fit(values: Tensor, levels: Tensor, *, bits: int) -> None:
    """Write the levels that the magnitudes of values are sent as, in codes of so many bits: they rise.

    Args:
        values: float32 or float64; beyond float32 they count as its largest number.
        levels: float32, ``2 ** (bits - 1)`` of them. All are 0 if there are no values.
        bits: 2, 4 or 8.
    """
    run.codebook_fit(values, levels, bits)


def values_encode_all(
    positions: Sequence[Tensor],
    kept: Sequence[int],
    values: Sequence[Tensor],
    parameters: Sequence[int],
    elements: Sequence[int],
    ends: Tensor,
    out: Tensor,
    *,
    forms: Sequence[str] | None = None,
    heads: Sequence[Tensor | None] | None = None,
) -> None:
    """Write the sections of the first ``kept`` positions of tensors, which must ascend, and values.

    Args:
        values: float32 or float64, one for each position; rounded to nearest even where the form is
            narrower, and to the largest number where that would be infinite.
        parameters: of the code, see :func:`.sizes.golomb_parameter`.
        elements: how many elements each tensor has that the positions are in.
        ends: as in :func:`binary_encode_all`.
        out: uint8, from there on at least :func:`.sizes.values_bound` of them for each tensor.
        forms: how values of each are written, one of :data:`.sizes.FORMS`; None for "full".
        heads: for "signs", one element like the values: what all of them count as. For codes the levels, as
            :func:`codebook_fit` writes them; each value becomes the nearest one, the lower of two that are as near.
    """
    forms = forms or ["full"] * len(positions)
    for i, (form, head) in enumerate(zip(forms, heads or [None] * len(forms), strict=True)):
        check_one_of("form", form, FORMS)
        if (form == "signs" or form in CODE_BITS) != (head is not None):
            raise ValueError(f'head must be given for "signs" and codes, and for no other form, got {form!r}')
        kind = values[0].dtype if form == "signs" and values else torch.float32
        if head is not None and head.dtype is not kind:  # the kernels see bytes
            raise ValueError(f"heads[{i}] must be {kind} for {form!r}, got {head.dtype}")
    raw = heads and [head.view(torch.uint8) if head is not None and head.is_contiguous() else head for head in heads]
    run.values_encode(positions, kept, values, raw, [FORMS[form] for form in forms], elements, parameters, ends, out)
    _ascended(ends, elements)


def values_decode_all(
    sections: Sequence[Sequence[Tensor]],
    own: int,
    parameters: Sequence[int],
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    scale: float,
    *,
    forms: Sequence[str] | None = None,
    momentums: Sequence[Tensor] | None = None,
    factor: float = 0.0,
    masking: bool = True,
    decay: float = 1.0,
    by_senders: bool = False,
) -> Counts:
    """Turn the sections of all ranks into the results, in place over the gradients, and update the residuals.

    ``grad`` becomes the sum of the sections, added in the order of the list, times ``scale``; the
    residual becomes ``decay`` times ``x`` minus what section ``own`` says. With momentum, ``u = factor * momentum +
    grad`` is kept, the residual becomes ``x + factor * u``, and both are what is left where a value
    was sent: momentum 0 with masking, and the residual ``factor * u``. All in one pass.

    Args:
        sections: of each tensor those of all ranks, uint8; bytes after the ranges of a section are ignored.
        forms: None for "full". With momentum, nothing of ``x`` is left where it was sent, however its value was
            rounded.
        momentums: like the residuals.
        decay: 1 with momentum.
        by_senders: divide each sum by how many sections have the element, first.

    Returns:
        The number of malformed ranges of all sections of each tensor. If one is not 0, what is overwritten of it holds
        anything.
    """
    for form in forms or ():
        check_one_of("form", form, FORMS)
    if momentums is not None and (residuals is None or decay != 1):
        raise ValueError(f"momentum needs a residual and decay 1, got {decay}")
    check_factor(momentums, factor)
    codes = [FORMS[form] for form in forms or ["full"] * len(grads)]
    columns, options = (
        (codes, parameters, grads, residuals, momentums),
        (own, scale, factor, masking, decay, by_senders),
    )
    return run.values_decode(*columns, _of_ranks(sections, len(grads)), *options)


# ---- samples ------------------------------------------------------------------------------------


def sample_offer(
    grad: Tensor, residual: Tensor | None, values: Tensor, key: Key, *, first: int = 0, block: int = 1
) -> int | Tensor:
    """Write ``x`` in one block of each of as many groups as there are values for; return how many are not finite.

    Args:
        values: in the dtype of the arithmetic, ``block`` for each group; at least one group's if there are elements. A
            last block that is shorter ends in zeros.
        key: names the random bits; ranks that are to choose alike must use the same one.
        first: which draw of that stream the first group's is.
        block: of how many neighbouring elements. Those of all elements, sent or not, are counted.
    """
    return run.sample_offer(grad, residual, values, key, first, block)


def sample_decode(
    values: Tensor,
    grad: Tensor,
    residual: Tensor | None,
    key: Key,
    scale: float,
    *,
    first: int = 0,
    weighted: bool = False,
    block: int = 1,
) -> None:
    """Write ``value * scale`` at the chosen elements of ``grad``, 0 elsewhere; the residual becomes ``x``, and 0 there.

    Args:
        weighted: multiply each value by the number of blocks in its group first, which makes the result unbiased.
    """
    run.sample_decode(values, grad, residual, key, scale, first, weighted, block)
