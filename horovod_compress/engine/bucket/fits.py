"""Says why a gradient is not one of its tensor."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ...errors import ConfigError
from ...schedule.plan import TensorSpec


def refuse(grad: Tensor, tensor: TensorSpec, where: torch.device, rank: int) -> None:
    """Refuse a gradient, if something is wrong with it.

    Raises:
        ConfigError: says what it should be.
    """
    if tuple(grad.shape) != tensor.shape or str(grad.dtype) != f"torch.{tensor.dtype}":
        raise ConfigError(
            f"rank {rank}: the gradient of {tensor.name} should be {tensor.dtype} of shape {tensor.shape}, got "
            f"{grad.dtype} of shape {tuple(grad.shape)}"
        )
    if grad.device != where:
        raise ConfigError(
            f"rank {rank}: the gradient of {tensor.name} is on {grad.device}, its parameter was on {where} when "
            "the compression was made; move the model to its device first"
        )
    if any(not step and size > 1 for step, size in zip(grad.stride(), grad.shape, strict=True)):
        raise ConfigError(
            f"rank {rank}: the gradient of {tensor.name} has elements that share memory, as expand() makes them, "
            "and its result is written there: hand over grad.contiguous()"
        )


def refuse_shared(name: str, other: str, step: int, rank: int) -> NoReturn:
    """Refuse a gradient in the memory of another one of its step: each would take the other's result for its own.

    Args:
        name, other: whose gradients these are.

    Raises:
        ConfigError: names both.
    """
    raise ConfigError(
        f"rank {rank}: the gradients of {name} and {other} are in the same memory, in step {step}; give each parameter "
        "a gradient of its own, such as grad.clone()"
    )
