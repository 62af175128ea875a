"""Inputs that hurt, memory with guards around it, and one comparison for every kernel."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.dispatch import by_reference
from horovod_compress.ops.keys import ZERO_SIGN, Key
from tests.support.marks import slow

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: `make test` takes one of each size: float16 is another conversion only, and the tests of batches have all four.
FEW_DTYPES = [DTYPES[0], DTYPES[1], DTYPES[3], *slow(DTYPES[2])]
#: For kernels that take batches, which test_table.py compares in all four: lengths are handled alike in each.
BATCH_DTYPES = [DTYPES[0], DTYPES[3], *slow(*DTYPES[1:3])]
KEY = Key(seed=0x0123456789ABCDEF, step=7, bucket=3, rank=2, hop=5, purpose=ZERO_SIGN)
LENGTHS = (*range(131), *(2**k + d for k in range(8, 15) for d in (-1, 0, 1)))
POISON = 0xA5
GUARD = 64

_BITS = {torch.float32: (torch.int32, 32), torch.float64: (torch.int64, 64), torch.float16: (torch.int16, 16)}
_BITS[torch.bfloat16] = (torch.int16, 16)


def work(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Ordinary numbers mixed with any bit pattern, both zeros, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    integers, width = _BITS[dtype]
    low, high = -(1 << (width - 1)), (1 << (width - 1)) - 1
    patterns = torch.randint(low, high, (count,), generator=generator, dtype=torch.int64).to(integers).view(dtype)
    info = torch.finfo(dtype)
    special = torch.tensor(
        [0.0, -0.0, 0.0, info.smallest_normal / 2, -info.smallest_normal / 4, info.max, info.min, inf, -inf, nan],
        dtype=dtype,
    )
    kind = torch.rand(count, generator=generator)
    chosen = torch.randint(0, special.numel(), (count,), generator=generator)
    draw = torch.where(kind < 0.2, patterns, draw)
    return torch.where(kind > 0.8, special[chosen], draw)


def tame(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers only: what sums and steps are made of."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def words(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64)


def bits(count: int, seed: int) -> Tensor:
    """A bit vector of ``count`` bits whose padding is 0."""
    vector = words(ops.word_count(count), seed)
    if count % 64:
        vector[-1] &= (1 << (count % 64)) - 1
    return vector


def mask(count: int, density: float, seed: int) -> Tensor:
    """Return random positions."""
    chosen = np.random.default_rng(seed).random(count) < density
    return torch.from_numpy(np.flatnonzero(chosen).astype(np.int32))


def poison(count: int, dtype: torch.dtype) -> Tensor:
    """An output that still holds something else."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.full((count * size,), POISON, dtype=torch.uint8).view(dtype)


def count_rows_of(values: int, count: int, seed: int) -> list[Tensor]:
    """Return rows of any counts below ``values``, for ``count`` words; see `rules/shaped.h`."""
    counts = torch.randint(values, (64 * count,), generator=torch.Generator().manual_seed(seed)).numpy() ^ values // 2
    rows = []
    for place in range(ops.count_rows(values)):
        packed = np.packbits((counts >> place & 1).astype(bool), bitorder="little")
        rows.append(torch.from_numpy(packed.view(np.int64).copy()))
    return rows


class Guarded:
    """A copy of a tensor at a chosen misalignment, with poison before and after it."""

    def __init__(self, tensor: Tensor, shift: int) -> None:
        before = GUARD + shift
        self.memory = poison(before + tensor.numel() + GUARD, tensor.dtype)
        self.view = self.memory[before : before + tensor.numel()]
        self.view.copy_(tensor)
        self.outside = (self.memory[:before], self.memory[before + tensor.numel() :])

    def intact(self) -> bool:
        return all(bool((part.view(torch.uint8) == POISON).all()) for part in self.outside)


def differences(a: Tensor, b: Tensor) -> int:
    """Count elements that differ in any bit; two NaN are equal whatever their payload."""
    if not a.is_floating_point():
        return int((a != b).sum())
    integers, _ = _BITS[a.dtype]
    return int(((a.view(integers) != b.view(integers)) & ~(a.isnan() & b.isnan())).sum())


def flat(values: list[Any]) -> list[Any]:
    """Put the elements of lists in the place of the lists."""
    return [part for value in values for part in (flat(value) if isinstance(value, list) else [value])]


def compare(name: str | Callable[..., Any], *arguments: Any, shift: int = 0, **options: Any) -> None:
    """Run a kernel and its reference on equal arguments; nothing may differ, nor anything else change.

    In its place may stand what calls kernels.

    Every tensor is placed at its own misalignment, derived from ``shift``. Inputs are compared as
    well: a kernel may not touch them.
    """
    guarded: list[Guarded] = []

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(part) for part in value]
        if not isinstance(value, Tensor):
            return value
        guarded.append(Guarded(value, (shift * (2 * len(guarded) + 1)) % GUARD))
        return guarded[-1].view

    def clone(value: Any) -> Any:
        if isinstance(value, list):
            return [clone(part) for part in value]
        return value.clone() if isinstance(value, Tensor) else value

    placed, plain = place(list(arguments)), clone(list(arguments))
    placed_options = {key: place(value) for key, value in options.items()}
    plain_options = {key: clone(value) for key, value in options.items()}
    run = single.named(name) if isinstance(name, str) else name
    result = run(*placed, **placed_options)
    with by_reference():
        expected = run(*plain, **plain_options)
    assert result == expected, f"{name} returned {result}, the reference {expected}"
    assert all(part.intact() for part in guarded), f"{name} wrote outside its arguments"
    pairs = [*zip(flat(placed), flat(plain), strict=True)]
    pairs += zip(flat(list(placed_options.values())), flat(list(plain_options.values())), strict=True)
    for position, (mine, theirs) in enumerate(pairs):
        if isinstance(mine, Tensor):
            wrong = differences(mine, theirs)
            assert wrong == 0, f"{name}: {wrong} of {mine.numel()} elements of argument {position} are wrong"


def ones(vector: Tensor) -> np.ndarray:
    """Unpack a bit vector."""
    return np.unpackbits(vector.numpy().view(np.uint8), bitorder="little")
