"""Lets tests that ask for GPUs run on CPUs: what they put on a device stays where it is.

They were written for a GPU for each rank, but most of them are about hooks, graphs and parameters, not about devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

CPU = torch.device("cpu")


def is_gpu(device: Any) -> bool:
    """Return whether a test means a GPU by this argument: a number, a name or a device."""
    if isinstance(device, bool):
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


class OnCPU(TorchFunctionMode):
    """Makes and moves tensors on the CPU, whichever GPU is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(CPU if is_gpu(value) else value for value in args)
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def stand_in(count: int) -> OnCPU:
    """Replace, in this process, what tests ask CUDA for; enter the result where a test runs.

    Args:
        count: of the GPUs that there seem to be.
    """
    common_distributed.TEST_CUDA = common_distributed.TEST_HPU = True
    # Accelerators of another kind are counted too; with those of CUDA, torch itself would begin to look for them.
    torch.hpu = SimpleNamespace(device_count=lambda: count, is_available=lambda: False)
    torch.cuda.device_count = lambda: count
    torch.cuda.current_device = lambda: 0
    for name in ("set_device", "synchronize", "manual_seed_all", "empty_cache"):
        setattr(torch.cuda, name, lambda *given, **named: None)
    torch.cuda.device = lambda *given: contextlib.nullcontext()  # type: ignore[assignment, misc]
    nn.Module.cuda = lambda module, device=None: module  # type: ignore[method-assign, assignment]
    nn.Module.to = _moved(nn.Module.to)  # type: ignore[method-assign, assignment]
    construct = DistributedDataParallel.__init__

    def without_devices(
        model: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        construct(model, module, **options)

    DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign, assignment]
    return OnCPU()


def _moved(to: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(module: nn.Module, *given: Any, **named: Any) -> Any:
        given = tuple(CPU if is_gpu(value) else value for value in given)
        return to(module, *given, **{key: CPU if is_gpu(value) else value for key, value in named.items()})

    return on_cpu
