"""Gradients in memory that autograd still needs, which a slow rest of the pass would find overwritten."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.front import DDP, hvc, start, trained
from tests.support.rank import check, rank

start()
torch.set_num_threads(1)
WORLD = 2

if DDP:
    import torch.distributed as dist
else:
    import horovod.torch as hvd


class Slow(torch.autograd.Function):
    """Takes its time in the backward pass, in which results of other ranks come."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.3)
        return grad


class OfNumpy(torch.autograd.Function):
    """A sum, whose gradients are two tensors of one array."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        return torch.from_numpy(left.detach().numpy() + right.detach().numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        array = grad.contiguous().numpy()
        return torch.from_numpy(array), torch.from_numpy(array)


class Net(nn.Module):
    """The last parameter enters a sum by a view of it; its gradient comes first, and is exchanged first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.after = nn.Linear(6, 6), nn.ParameterList([torch.randn(6)])

    def forward(self, given: Tensor, last: str) -> Tensor:
        found = Slow.apply(self.layer(given))
        if last == "viewed":
            found = found + self.after[0].unsqueeze(0)
        if last == "of numpy":
            found = OfNumpy.apply(found, self.after[0].unsqueeze(0))
        return (found * torch.arange(1.0, 7.0)).square().sum()


def batch(number: int) -> Tensor:
    return torch.randn(1, 6, generator=torch.Generator().manual_seed(10 * number + rank()))


def mean(grad: Tensor, name: str) -> Tensor:
    if not DDP:
        return hvd.allreduce(grad, name=name)  # type: ignore[no-any-return]
    dist.all_reduce(grad)
    return grad / WORLD


def far(name: str, attached: bool, *passes: str, clears: bool = False) -> float:
    """Return how far gradients are from the means of what autograd gives each rank, out of the largest.

    Args:
        passes: how the last parameter is used in each; the last one is exchanged, and the others added up on each rank.
        clears: gradients of the passes before are zeroed in place; that of the last parameter is dropped.
    """
    net = Net()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    named = [(f"{name}.{key}", parameter) for key, parameter in net.named_parameters()]
    compression = hvc.Compression.none(named, timeout=30.0, schedule="layerwise", min_elements=1)
    if DDP or attached:
        _, optimizer = trained(net, optimizer, compression, plain=DDP)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    expected = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for number, last in enumerate(passes):
        new = torch.autograd.grad(net(batch(number), last), list(net.parameters()), allow_unused=True)
        if clears:
            expected = [torch.zeros_like(one) for one in expected]
            net.layer.zero_grad(set_to_none=False)
            net.after[0].grad = None
        expected = [one if grad is None else one + grad for one, grad in zip(expected, new, strict=True)]
        with compression.no_sync() if number + 1 < len(passes) else contextlib.nullcontext():
            net(batch(number), last).backward()
    if not DDP:
        optimizer.synchronize()
    means = [mean(one, f"{name}.{at}") for at, one in enumerate(expected)]
    compression.close()
    pairs = zip(net.parameters(), means, strict=True)
    return max(
        float((one.grad - other).abs().max() / other.abs().max()) for one, other in pairs if one.grad is not None
    )


for kind in ("viewed", "of numpy"):
    check(kind, lambda kind=kind: far(kind, True, kind))
    if DDP:
        check(f"{kind} later", lambda kind=kind: far(f"{kind} later", True, "unused", kind))
        check(f"{kind} anew", lambda kind=kind: far(f"{kind} anew", True, "unused", kind, clears=True))
    else:
        check(f"{kind}, tokens", lambda kind=kind: far(f"{kind}, tokens", False, kind))
