"""How the values of a section are written: whole, in 16 bits, or as codes of 2, 4 or 8 bits.

A code is a sign and one of 2, 8 or 128 magnitudes, the levels, which are fitted to the section's values in each step,
see ``csrc/rules/codebook.h``. After DeepReduce (Xu et al., arXiv:2102.03112, NeurIPS 2021), which codes the
values of a sparse tensor apart from its positions, and SparseLoCo (Sarfi et al., arXiv:2508.15706), whose deployed
format has 2 bits a value. Where codes and levels would take as much as the values, these are sent whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ...ops.sizes import CODE_BITS, levels_of
from ...schedule.plan import Bucket
from ..base import check_choice
from ..work import work_dtype


def check_value_bits(value_bits: int) -> None:
    """Refuse what no value is written in.

    Raises:
        ConfigError: says what would do.
    """
    check_choice("value_bits", value_bits, 2, 4, 8, 16, 32)


def value_form(value_bits: int, bucket: Bucket, most: int) -> str:
    """Return how at most so many values of a tensor are written, one of ``ops.sizes.FORMS``."""
    if value_bits == 16:  # float16 ends at 65504, which values of other dtypes pass
        return "float16" if bucket.dtype == "float16" else "bfloat16"
    form = f"codes{value_bits}"
    coded = 4 * levels_of(form) + -(-most * value_bits // 8)
    return form if form in CODE_BITS and coded < most * work_dtype(bucket).itemsize else "full"


def largest(form: str) -> float:
    """Return the largest magnitude that a form has."""
    if form in CODE_BITS:
        return torch.finfo(torch.float32).max
    return torch.finfo(getattr(torch, form) if form in ("float16", "bfloat16") else torch.float64).max


def fitted(values: Tensor, form: str, room: Tensor) -> Tensor | None:
    """Return the levels of a section's values, written into ``room``; None where the form has none."""
    if form not in CODE_BITS:
        return None
    levels = room[: levels_of(form)]
    ops.codebook_fit(values, levels, bits=CODE_BITS[form])
    return levels


def rounded(values: Tensor, form: str, levels: Tensor | None) -> Tensor:
    """Return what values are where they are read."""
    if form == "full":
        return values
    if levels is None:
        return values.to(getattr(torch, form)).to(values.dtype)
    middles = levels[:-1] * 0.5 + levels[1:] * 0.5
    found = levels[torch.bucketize(values.abs().float(), middles)].to(values.dtype)
    return torch.where(values < 0, -found, found)


def own_bound(value_bits: int, x: str = "x") -> str:
    """Return the bound of a rank's own squared error, as a formula."""
    return f"own: (1 - k/d) |{x}|^2" if value_bits >= 16 else f"own: (1 - k mean^2 / |{x}|^2) |{x}|^2"
