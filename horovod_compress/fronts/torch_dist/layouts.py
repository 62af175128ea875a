"""How gradients lie in the buckets of DistributedDataParallel, which says so nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError


class Layouts:
    """Takes the gradients out of buckets, each element in its place.

    Torch writes a gradient as its parameter lay when the buckets were made, which is when the model is wrapped, and in
    some models once more before the second step. ``GradBucket.gradients()`` takes all for contiguous ones.

    Args:
        named: the parameters that are exchanged.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self._noted: dict[int, tuple[int, ...]] = {}  # strides, by the identity of a parameter

    def note(self) -> None:
        """Remember how all parameters lie, as the model has just been wrapped."""
        self._noted = {id(parameter): _strides(parameter) for _, parameter in self._named}

    def gradients(self, bucket: dist.GradBucket) -> list[Tensor]:
        """Return the gradients of a bucket, with the layouts of their parameters.

        Raises:
            ConfigError: a parameter lies otherwise than when the buckets were made.
        """
        found = []
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            strides = _strides(parameter)
            if self._noted.setdefault(id(parameter), strides) != strides or _lies_apart(parameter, grad):
                name = next(name for name, known in self._named if known is parameter)
                raise ConfigError(
                    f"{name} no longer lies in memory as it did when DistributedDataParallel made its buckets, as "
                    "after model.to(memory_format=torch.channels_last): gradients would go to the wrong elements; "
                    "change the format first, then wrap the model"
                )
            dense = not parameter.is_contiguous() and _is_dense(parameter)
            found.append(grad.view(-1).as_strided(parameter.size(), parameter.stride()) if dense else grad)
        return found


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor; those of dimensions of one element mean nothing."""
    return tuple(stride for stride, count in zip(tensor.stride(), tensor.size(), strict=True) if count != 1)


def _lies_apart(parameter: Tensor, grad: Tensor) -> bool:
    """Return whether ``.grad`` is memory of the bucket, and does not lie there as its parameter does."""
    own = parameter.grad
    return own is not None and own.data_ptr() == grad.data_ptr() and _strides(own) != _strides(parameter)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is a contiguous one whose dimensions were permuted."""
    size = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if count != 1:
            if stride != size:
                return False
            size *= count
    return True
