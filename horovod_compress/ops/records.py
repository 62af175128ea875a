"""The operations on QSGD's blocks: records of a norm and codes, those of LoCo, and sections of Elias codes.

They are laid out as ``rules/qsgd.h``, ``rules/loco.h`` and ``rules/elias.h`` say. A block's norm is the largest ``|x|``
(``norm`` 0) or the root of the sum of squares (``norm`` 2), in float32 whatever the gradient is. 16 random bits decide
how an element is rounded; without a key, where it may be None, it is rounded to the nearest level. Offsets say which
element of the key's stream the first one of a tensor is; None for 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import Counts, run
from .keys import Key
from .sizes import check_blocks, least_error

__all__ = [
    "elias_decode",
    "elias_encode",
    "loco_encode_all",
    "loco_fold",
    "qsgd_decode_all",
    "qsgd_encode_all",
    "qsgd_fold",
]

# ---- records ------------------------------------------------------------------------------------


def qsgd_encode_all(
    grads: Sequence[Tensor],
    records: Sequence[Tensor],
    key: Key | None,
    *,
    bits: int,
    block: int,
    norm: int,
    offsets: Sequence[int] | None = None,
) -> Counts:
    """Write a record for every block; return how many elements are not finite, which count as 0 in a norm.

    Args:
        records: uint8, :func:`.sizes.qsgd_record_bytes` for each block.
        bits: of a code, 2 to 8; ``2 ** (bits - 1) - 1`` is the code of the norm.
        block: how many elements share a norm.
        offsets: which element of the stream the first one of each tensor is; None for 0.
    """
    check_blocks(bits, block, norm)
    return run.qsgd_encode(grads, offsets, records, key=key, bits=bits, block=block, norm=norm)


def qsgd_fold(
    parts: Sequence[Tensor],
    out: Tensor,
    key: Key,
    *,
    bits: int,
    block: int,
    norm: int,
    offset: int = 0,
) -> None:
    """Write records of the mean of some ranks' records, rounded again without bias.

    Numbers are added in the order of the list, in float32.

    Args:
        out: may be one of the parts.
        offset: which element of the stream the first one is.
    """
    check_blocks(bits, block, norm)
    run.qsgd_fold(parts, out, key, bits, block, norm, offset)


def qsgd_decode_all(records: Sequence[Tensor], grads: Sequence[Tensor], *, bits: int, block: int, scale: float) -> None:
    """Write ``(code * scale) * norm`` over the gradients."""
    run.qsgd_decode(records, grads, bits=bits, block=block, scale=scale)


# ---- records of LoCo ----------------------------------------------------------------------------


def loco_encode_all(
    grads: Sequence[Tensor],
    kept: Sequence[Tensor] | None,
    records: Sequence[Tensor],
    left: Sequence[Tensor],
    *,
    bits: int,
    block: int,
    norm: int,
    kept_bits: int,
    beta: float,
) -> Counts:
    """Write a record for every block of gradient and what was kept, to the nearest level, and what is kept of that now.

    That is ``beta * kept + (1 - beta) * (gradient + kept - what the codes stand for)``: see ``rules/loco.h``.

    Args:
        kept: uint8, records of ``kept_bits`` with the largest magnitude as the norm; None for zeros.
        records: uint8, :func:`.sizes.qsgd_record_bytes` for each block.
        left: like ``kept``, apart from it.

    Returns:
        How many elements of gradient and what was kept are not finite.
    """
    _check_kept(bits, block, norm, kept_bits, beta)
    return run.loco_encode(
        grads, kept, records, left, bits=bits, block=block, norm=norm, kept_bits=kept_bits, beta=beta
    )


def loco_fold(
    parts: Sequence[Tensor],
    kept: Tensor | None,
    out: Tensor,
    left: Tensor,
    *,
    bits: int,
    block: int,
    norm: int,
    kept_bits: int,
    beta: float,
) -> None:
    """Write records of the mean of some ranks' records and what was kept, and what is kept of that now.

    Args:
        kept: as for :func:`loco_encode_all`, of all blocks.
        out: may be one of the parts.
        left: like ``kept``, apart from it.
    """
    _check_kept(bits, block, norm, kept_bits, beta)
    run.loco_fold(parts, kept, out, left, bits, block, norm, kept_bits, beta)


def _check_kept(bits: int, block: int, norm: int, kept_bits: int, beta: float) -> None:
    check_blocks(bits, block, norm)
    check_blocks(kept_bits, block, 0)
    if not 0 <= beta < 1:
        raise ValueError(f"beta must be in [0, 1), got {beta}")


# ---- Elias codes --------------------------------------------------------------------------------


def elias_encode(
    grad: Tensor,
    place: Tensor,
    out: Tensor,
    key: Key | None,
    *,
    bits: int,
    block: int,
    norm: int,
    offset: int = 0,
    error: float = 0.0,
) -> int | Tensor:
    """Write a tensor's section; return how many elements are not finite, a tensor on CUDA.

    Args:
        place: int64, two: where the section begins in ``out``; and where it ends, which is written. That is -1 where
            it begins at -1, and on CUDA if there is no room; then nothing that was written counts.
        out: uint8, from there on at least :func:`.sizes.elias_bound` of them.
        error: the largest squared error of a block, as a share of its squares, to the nearest level: without a key.
            Norms are then as large as that allows, see ``WidestNorm`` in ``rules/elias.h``. 0 for norms as ``norm``
            says.
    """
    check_blocks(bits, block, norm)
    if error and (key is not None or not least_error(bits, block) <= error < 1):
        raise ValueError(
            f"error must be in [{least_error(bits, block)}, 1) with bits={bits}, block={block} and no key, got {error}"
        )
    return run.elias_encode(grad, place, out, key, bits, block, norm, offset, error)


def elias_decode(sections: Sequence[Tensor], grad: Tensor, *, bits: int, block: int, scale: float) -> int | Tensor:
    """Write the sum of ``(level * scale) * norm`` over the sections, in their order, over ``grad``.

    Returns:
        The number of malformed ranges of all sections, a tensor on CUDA. If it is not 0, ``grad`` holds anything.
    """
    check_blocks(bits, block, 0)
    return run.elias_decode(sections, grad, bits, block, scale)
