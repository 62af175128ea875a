"""Selections and sections of one tensor, whose numbers a test reads at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.keys import Key
from horovod_compress.ops.sizes import CODE_BITS, levels_of


def begins(at: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return the place of a section that begins there, as :func:`ops.binary_encode_all` takes it."""
    return torch.tensor([at, -7], device=device)


def top_select(grad: Tensor, residual: Tensor | None, k: int, positions: Tensor, values: Tensor) -> tuple[int, int]:
    return _selected(ops.top_select_all, grad, residual, k, positions, values)


def binary_select(grad: Tensor, residual: Tensor | None, k: int, positions: Tensor, mean: Tensor) -> tuple[int, int]:
    return _selected(ops.binary_select_all, grad, residual, k, positions, mean)


def chunk_select(
    grad: Tensor, residual: Tensor | None, chunk: int, k: int, last: int, positions: Tensor, values: Tensor
) -> tuple[int, int]:
    """Select within chunks; what was not found is 0, as kernels leave there what they like."""
    select = partial(ops.chunk_select_all, chunk=chunk, k=k)
    kept, nonfinite = _selected(select, grad, residual, last, positions, values)
    positions[kept:], values[kept:] = 0, 0
    return kept, nonfinite


def head_of(form: str, kind: torch.dtype, device: torch.device | str = "cpu") -> Tensor | None:
    """Return what a section says of all values: a mean, or levels."""
    if form in CODE_BITS:
        return torch.linspace(0.1, 3.0, levels_of(form), dtype=torch.float64).float().to(device)
    return torch.full((1,), 0.75, dtype=kind, device=device) if form == "signs" else None


def _selected(select: Callable[..., None], *given: Any) -> tuple[int, int]:
    numbers = [torch.empty(3, dtype=torch.int64, device=given[0].device)]
    columns = [None if one is None else [one] for one in given]
    select(*columns, numbers)
    return ops.selected(select, columns, numbers)[0]


def binary_encode(positions: Tensor, kept: int, mean: Tensor, b: int, elements: int, out: Tensor) -> int:
    """Write a section; return its bytes."""
    single.binary_encode(positions, kept, mean, b, elements, place := begins(device=out.device), out)
    return int(place[1])


def values_encode(
    positions: Tensor, kept: int, values: Tensor, b: int, elements: int, out: Tensor, **options: Any
) -> int:
    """Write a section; return its bytes."""
    single.values_encode(positions, kept, values, b, elements, place := begins(device=out.device), out, **options)
    return int(place[1])


def elias_encode(grad: Tensor, out: Tensor, key: Key | None, **options: Any) -> tuple[int, int]:
    """Write a section; return its bytes, and how many elements are not finite."""
    nonfinite = ops.elias_encode(grad, place := begins(device=out.device), out, key, **options)
    return int(place[1]), int(nonfinite)
