"""The operations on plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import Counted, Counts, batch
from .legality import REFERENCE, backend, check_apart, checked, dtype_code

__all__ = ["dense_add", "dense_decode", "dense_decode_all", "dense_offer", "dense_offer_all", "triad"]

_OFFER, _DECODE = batch("dense_offer"), batch("dense_decode")


@Counted
def dense_offer_all(grads: Sequence[Tensor], residuals: Sequence[Tensor] | None, outs: Sequence[Tensor]) -> Counts:
    """Write ``grad + residual`` in the dtype of the outputs, all of one; return how many of these are not finite."""
    return _OFFER((grads, residuals, outs))


def dense_offer(grad: Tensor, residual: Tensor | None, out: Tensor) -> int | Tensor:
    """Do :func:`dense_offer_all` for one tensor."""
    return dense_offer_all.counts([grad], None if residual is None else [residual], [out])[0]


def dense_decode_all(
    payloads: Sequence[Tensor], grads: Sequence[Tensor], *, scale: float, residuals: Sequence[Tensor] | None = None
) -> None:
    """Write ``payload * scale`` over the gradients; residuals, if given, become 0. The payloads are of one dtype."""
    _DECODE((payloads, grads, residuals), (scale,), {"scale": scale})


def dense_decode(payload: Tensor, grad: Tensor, *, scale: float, residual: Tensor | None = None) -> None:
    """Do :func:`dense_decode_all` for one tensor."""
    dense_decode_all([payload], [grad], scale=scale, residuals=None if residual is None else [residual])


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


def triad(a: Tensor, b: Tensor, c: Tensor, s: float) -> None:
    """Write ``b + s * c``, float32: the yardstick for memory bandwidth."""
    native, device, launch = backend(a)
    count = a.numel()
    at = [checked(n, t, torch.float32, count, device) for n, t in (("a", a), ("b", b), ("c", c))]
    if REFERENCE:
        REFERENCE.triad(a, b, c, s)
    else:
        native.triad(*at, s, count, launch)
