"""What is timed, and whether it is right: a check against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import single
from benchmarks.results import spread
from horovod_compress.ops.dispatch import by_reference


@dataclass
class Case:
    """What is timed, with gradients of one type.

    Attributes:
        bytes_moved: with gradients of this type. Yardsticks, other libraries' versions (but optimizers) and what reads
            no gradients give one number for all, and are timed with float32 only.
    """

    name: str
    bytes_moved: int
    run: Callable[[], object]
    wrong: Callable[[], int] | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return spread(self.seconds).median


def differences(a: Tensor, b: Tensor) -> int:
    """Count elements that are not the same bits."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    return int((a.view(integers) != b.view(integers)).sum())


def against_reference(name: str, *arguments: object, **options: object) -> Callable[[], int]:
    """Return a check that runs a kernel and its reference on copies of the same arguments."""

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(part) for part in value]
        return value.clone() if isinstance(value, Tensor) else value

    def check() -> int:
        mine, theirs = copied(list(arguments)), copied(list(arguments))
        named = [{key: copied(value) for key, value in options.items()} for _ in range(2)]
        results = [single.named(name)(*mine, **named[0])]
        with by_reference():
            results.append(single.named(name)(*theirs, **named[1]))
        pairs = [*zip(mine, theirs, strict=True), *zip(named[0].values(), named[1].values(), strict=True)]
        lists = [zip(a, b, strict=True) for a, b in pairs if isinstance(a, list)]
        pairs = [(a, b) for a, b in [*pairs, *(pair for each in lists for pair in each)] if isinstance(a, Tensor)]
        return int(results[0] != results[1]) + sum(differences(a, b) for a, b in pairs)

    return check


def kernel_case(label: str, bytes_moved: int, name: str, *arguments: object, **options: object) -> Case:
    function = single.named(name)
    check = against_reference(name, *arguments, **options)
    return Case(label, bytes_moved, lambda: function(*arguments, **options), check)
