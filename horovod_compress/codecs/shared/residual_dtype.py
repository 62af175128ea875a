"""The dtype of a residual, where a method lets it be chosen.

In bfloat16 it takes 2 bytes for each element, and is rounded at random: up as often as what is cut off is a part of a
unit (csrc/rules/kept.h). What a round keeps is then right on average, and exact where it fits into 8 bits.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from ...errors import ConfigError
from ...schedule.plan import Bucket
from ..base import check_choice
from ..work import per_element

ResidualDtype = Literal["float32", "bfloat16"]


def check_residual_dtype(residual_dtype: str, has_residual: bool = True) -> None:
    """Refuse a dtype that no residual has, and one for a residual that there is not.

    Raises:
        ConfigError: says what there is.
    """
    check_choice("residual_dtype", residual_dtype, *get_args(ResidualDtype))
    if residual_dtype != "float32" and not has_residual:
        raise ConfigError(
            f'residual_dtype="{residual_dtype}" is for a residual, and there is none with compensation="none"; leave '
            "one of them out"
        )


def epsilon_of(residual_dtype: str) -> float:
    """Return by what part of a number keeping it may change it, at most."""
    return 2.0**-7 if residual_dtype == "bfloat16" else 2.0**-23


def residual_state(bucket: Bucket, residual_dtype: str) -> dict[str, torch.dtype]:
    """Return the residual of a bucket, for its layout."""
    return per_element(bucket, "residual", short=residual_dtype == "bfloat16")
