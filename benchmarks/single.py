"""The operations of batches for one tensor alone, by the names of their kernels: ``single.sign_pack(x, bits)``.

Each takes what its batch takes, in that order, and of each tensor the one: ``grad`` instead of ``grads``. What counts
returns the count. Operations that take no batches are as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.ops.table import BY_NAME


def operation(name: str) -> Callable[..., Any]:
    """Return an operation for one tensor."""
    if name in BY_NAME and BY_NAME[name].members:
        return _alone(name)
    found: Callable[..., Any] = getattr(ops, name)
    return found


@cache
def _alone(name: str) -> Callable[..., Any]:
    """Return the operation of a batch for one tensor."""
    together: Callable[..., Any] = getattr(ops, f"{name}_all")
    row = BY_NAME[name]
    columns = {member.many: member.name for member in row.given}
    columns |= {array.name: array.name for array in row.arrays if array.by_rank and array.shared_out}
    several = [parameter in columns for parameter in inspect.signature(together).parameters]
    plural = {one: many for many, one in columns.items()}
    # Where its part of what all ranks sent begins.
    usual = {many: [0] for many in columns if many.startswith("first_")}

    def alone(*arguments: Any, **options: Any) -> Any:
        positional = [
            [value] if many and value is not None else value for many, value in zip(several, arguments, strict=False)
        ]
        named = {plural.get(key, key): [value] if key in plural else value for key, value in options.items()}
        kept = {key: value for key, value in named.items() if value != [None]}
        found = together(*positional, **(usual | kept))
        return found[0] if row.counts else None

    return alone


def sign_offer(
    grad: Tensor, residual: Tensor | None, bits: Tensor, sums: Tensor | None, row_length: int, **options: Any
) -> Any:
    """Offer signs with the sums of rows instead of steps."""
    return operation("sign_offer")(grad, residual, bits, None, row_length, sums=sums, **options)


def place_in(out: Tensor) -> Tensor:
    """Return the place of a section at the beginning of an array, as :func:`ops.binary_encode_all` takes it."""
    return torch.zeros(2, dtype=torch.int64, device=out.device)


def numbers_for(grad: Tensor) -> Tensor:
    """Return room for what a selection finds, as :func:`ops.top_select_all` takes it."""
    return torch.zeros(3, dtype=torch.int64, device=grad.device)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return an operation for one tensor."""
    try:
        return operation(name)
    except AttributeError:
        raise AttributeError(f"there is no operation {name!r}") from None


def named(name: str) -> Callable[..., Any]:
    """Return an operation by its name: of a batch, or for one tensor."""
    return sign_offer if name == "sign_offer" else operation(name)
