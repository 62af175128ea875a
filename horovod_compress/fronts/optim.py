"""Optimizers of systems that this package covers, and that torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError


class LANS(torch.optim.Optimizer):
    """LAMB with normalised gradients and Nesterov's momentum, for large batches; CLAN's optimizer.

    For each tensor x with gradient g, where m and v are the running means of n and its square, without their bias::

        n = g / |g|
        r = m / (sqrt(v) + eps) + weight_decay x
        c = n / (sqrt(v) + eps) + weight_decay x
        x = x - lr |x| (beta1 r / |r| + (1 - beta1) c / |c|)

    A norm of 0 counts as 1. Gradients and weights are dense, of a floating-point type; their state is of the same type.
    Norms are torch's, which depend on the number of threads: give all ranks as many.

    Source: S. Zheng, H. Lin, S. Zha, M. Li, *Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes*,
    arXiv:2006.13484, algorithm 2; Y. Zhong et al., *Compressed Communication for Distributed Training: Adaptive Methods
    and System*, arXiv:2105.07829, section 3 (CLAN).

    Args:
        params: parameters, or groups of them.
        lr: learning rate; how far a tensor moves in a step, as a share of its norm.
        betas: of the running means of the gradient and of its square, at least 0 and below 1.
        eps: added to the root of v.
        weight_decay: at least 0.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        if not (lr >= 0 and eps > 0 and weight_decay >= 0):
            raise ConfigError(
                f"lr and weight_decay should be at least 0 and eps above 0, got lr={lr!r}, "
                f"weight_decay={weight_decay!r}, eps={eps!r}"
            )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas should be two numbers from 0 to 1, without 1, got {betas!r}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, weights: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise ConfigError("LANS takes dense gradients only; write sparse=False")
        state, (beta1, beta2) = self.state[weights], group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
        state["step"] += 1
        first, second = state["exp_avg"], state["exp_avg_sq"]
        unit = (grad / _norm(grad)).to(grad.dtype)  # a single number would take the type of its norm
        first.lerp_(unit, 1 - beta1)
        second.mul_(beta2).addcmul_(unit, unit, value=1 - beta2)
        divisor = (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        far = _norm(weights).mul_(group["lr"])
        ways = (first / (1 - beta1 ** state["step"])).div_(divisor), unit.div_(divisor)
        moved = [way.add_(weights, alpha=group["weight_decay"]) for way in ways]
        for share, way in zip((beta1, 1 - beta1), moved, strict=True):
            weights.sub_(way.mul_(far * share / _norm(way)))


def _norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm of a tensor, 1 for one of zeros; on its device, which nobody waits for."""
    # In float32 at least: float16 ends at 65504, which norms pass though no element does.
    norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return torch.where(norm > 0, norm, torch.ones_like(norm))
