"""Adam's second moment V, held: how it moves, and how torch's own step comes to divide by it.

V moves by exact mean gradients only, which every rank has, and so it is equal everywhere and costs no bytes:

    V = b2^n V + (1 - b2^n) r^2     r = mean of the ranks' gradients, n steps since the last such r

The optimizer stays torch's own: before its step, ``exp_avg_sq`` is set so that its own formula divides by what is
held. :mod:`.held` does this where gradients are exchanged, :mod:`.update_moment` where
weight updates are.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import ConfigError, StateError

#: Optimizers whose second moment this is.
FAMILY = (torch.optim.Adam, torch.optim.AdamW)
#: A divisor is at least this part of the root mean square of its row: an element that has hardly moved yet must
#: neither set its row's scale nor be divided by almost nothing.
FLOOR = 0.1
#: No element moves by more than so many learning rates in a step, as in Adam itself (Kingma and Ba 2015, section 2.1).
BOUND = 10.0

Place = tuple[dict[str, Any], nn.Parameter, str]


def check_options(second_moment: str, **numbers: object) -> None:
    """Refuse options that have no meaning.

    Raises:
        ConfigError: says which.
    """
    if second_moment not in ("auto", "shared", "own"):
        raise ConfigError(f'second_moment should be "auto", "shared" or "own", got {second_moment!r}')
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} should be a whole number, at least 1, got {value!r}")


def may_share(optimizer: Any, second_moment: str) -> bool:
    """Return whether the second moment of an optimizer may be held, as far as the optimizer goes.

    Raises:
        ConfigError: it is to be shared, and cannot be.
    """
    groups = optimizer.param_groups
    fits = isinstance(optimizer, FAMILY) and all(float(g["betas"][1]) and not g.get("amsgrad") for g in groups)
    if second_moment == "shared" and not fits:
        raise ConfigError(
            'second_moment="shared" is for Adam and AdamW with a second beta above 0 and without amsgrad; got '
            f'{type(optimizer).__name__}: leave it at "auto", or choose "own"'
        )
    return fits and (second_moment == "shared" or (second_moment == "auto" and _is_stock(optimizer)))


def _is_stock(optimizer: Any) -> bool:
    """Return whether the step is torch's own: another one may have another use for the state that is written here."""
    steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind) and not _is_horovod_s(kind)]
    # Torch writes a wrapped step into each class of which it makes the first optimizer.
    return bool(steps) and inspect.unwrap(steps[0]) in {inspect.unwrap(kind.step) for kind in FAMILY}


def _is_horovod_s(kind: type) -> bool:
    return "_allreduce_grad_async" in vars(kind)


def check_state(state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a saved second moment that is not of these parameters.

    Raises:
        ConfigError: names the parameter.
    """
    for name, saved in state.items():
        moment = _moment_of(name, saved)
        if name not in shapes or moment.shape != shapes[name] or not bool((moment.isfinite() & (moment >= 0)).all()):
            raise StateError(
                f"the saved second moment of {name} should be finite, of shape {tuple(shapes.get(name, ()))}, got "
                f"{tuple(moment.shape)}; load the state of the same model, saved at a step that went well"
            )


def _moment_of(name: object, saved: object) -> Tensor:
    """Return the tensor of a saved second moment, whose other parts are numbers.

    Raises:
        StateError: it is malformed.
    """
    parts = dict(saved) if isinstance(saved, Mapping) else {}
    moment, divides = parts.pop("moment", None), parts.pop("divides", False)
    fits = isinstance(moment, Tensor) and moment.dtype in (torch.float32, torch.float64)
    numbers = {"steps", *parts} <= {"steps", "since", "eps"}
    fits = fits and numbers and type(divides) is bool and all(map(_is_number, parts.values()))
    if not fits or not parts.get("steps", 1):
        raise StateError(
            f"the saved second moment of {name!r:.100} should be a dense tensor of at least 32 bits, and the number "
            f"of steps that it covers, got {saved!r:.100}; load what state_dict() returned"
        )
    assert isinstance(moment, Tensor)
    return moment


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


@dataclass
class Moment:
    """The second moment of one parameter; equal on every rank.

    Attributes:
        moment: V / (1 - b2^s), of at least 32 bits, contiguous.
        steps: s, the steps that it stands for.
        floor: what V counts for at least in compressed rounds, for each row.
    """

    moment: Tensor
    steps: float
    floor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.derive()

    def derive(self) -> None:
        """Find what follows from V."""
        several = self.moment.dim() > 1
        rows = self.moment.shape[0] if several else 1
        shape = (rows, *[1] * (self.moment.dim() - 1)) if several else ()
        self.floor = (mean_power(self.moment, 1, rows) * FLOOR**2).to(self.moment.dtype).view(shape)

    def squares(self) -> Tensor:
        """Return the squares of what to divide by, but for eps, which the optimizer adds itself."""
        return torch.maximum(self.moment, self.floor)

    def move(self, grad: Tensor, beta2: float, steps: float) -> None:
        """Take in an exact mean gradient, for all steps since the last one."""
        keep, share = beta2**steps, 1 - beta2**self.steps
        self.steps += steps
        self.moment.mul_(keep * share).addcmul_(grad, grad, value=1 - keep).div_(1 - beta2**self.steps)
        self.derive()


def unmoved(moment: Tensor, group: int, before: Tensor | None = None) -> Tensor | None:
    """Return the elements whose second moment is exactly 0, unless they stay 0 anyway.

    They do where each group of so many elements is wholly 0 or not at all, as the rows of an embedding are. Once one
    group has both, as in a pruned layer, one that is wholly 0 now may have both when its first gradient comes.

    Returns:
        Their indices, or None if there are none; ``before``, where these are the same.
    """
    zero = moment.view(-1) == 0
    if group == 1 or not bool(zero.any()):
        return None
    if group > 1:
        groups = nn.functional.pad(zero, (0, -zero.numel() % group), value=bool(zero[-1])).view(-1, group)
        if not bool((groups.any(dim=1) & ~groups.all(dim=1)).any()):
            return None
    index = zero.nonzero().view(-1)
    return before if before is not None and torch.equal(index, before) else index


def on_its_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Let a tensor's GPU be the current one, as kernels need; a program's own may be another."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def mean_power(values: Tensor, power: int, rows: int = 1) -> Tensor:
    """Return the mean of ``|x| ** power`` of each row, float64; equal on all ranks.

    Torch sums in an order that depends on its number of threads, which ranks need not share.
    """
    sums = torch.zeros(rows, dtype=torch.float64, device=values.device)
    if not values.numel():
        return sums
    length = values.numel() // rows
    with on_its_device(values):
        ops.norm_offer(values.view(-1), sums, length, power=power)
    return sums.div_(length)


def taken_over(group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Return the second moment that an optimizer has made itself, and the steps that it stands for."""
    steps = float(state["step"])
    return corrected(group, state, steps), steps


def corrected(group: Mapping[str, Any], state: Mapping[str, Any], steps: float) -> Tensor:
    """Return ``exp_avg_sq``, after that many steps, without its bias."""
    return (wide(state["exp_avg_sq"]) / (1 - float(group["betas"][1]) ** steps)).contiguous()


def places(optimizer: Any, names: Mapping[int, str]) -> Iterator[Place]:
    """Return the parameters of an optimizer that have a name, each with its group.

    Args:
        names: by the parameter's id.
    """
    for group in optimizer.param_groups:
        yield from ((group, parameter, names[id(parameter)]) for parameter in group["params"] if id(parameter) in names)


def names_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """Return names by the parameter's id."""
    return {id(parameter): name for name, parameter in named}


def gradient(optimizer: Any, group: Mapping[str, Any], parameter: nn.Parameter) -> Tensor:
    """Return the gradient as Adam's moments see it."""
    assert parameter.grad is not None
    grad = wide(parameter.grad)
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a gradient scaler leaves it to a fused step
        grad = grad / scale
    grad = -grad if group["maximize"] else grad
    # Groups say themselves which decay it is from torch 2.7 on.
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    if group["weight_decay"] and not decoupled:
        grad = grad.add(parameter, alpha=float(group["weight_decay"]))
    return grad


def write(
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    grad: Tensor,
    held: Moment,
    now: float,
    *,
    exact: bool = False,
    left: float = 1.0,
) -> None:
    """Set the second moment of Adam so that its step number ``now``, with this gradient, divides by V's root + eps.

    Or by more, where its first moment would move an element by more than :data:`BOUND`, and where this gradient is many
    times that root: Adam adds its square to what it is given.

    Args:
        exact: divide by V as it is, without :data:`FLOOR`.
        left: at least this part of that square stays; the rest may be taken off beforehand. Below 1 the state may be
            less than nothing until the step is done, with this very gradient. In 16 bits all of it stays.
    """
    second, first = state["exp_avg_sq"], wide(state["exp_avg"]).contiguous()
    out = second if second.dtype is first.dtype and second.is_contiguous() else torch.empty_like(first)
    beta1, beta2 = map(float, group["betas"])
    with on_its_device(out):
        ops.adam_hold_all(
            [out.view(-1)],
            [first.view(-1)],
            [grad.contiguous().view(-1)],
            [held.moment.view(-1)],
            None if exact else [held.floor.view(-1)],
            betas=(beta1, beta2),
            step=now,
            bound=BOUND,
            left=left if second.element_size() > 2 else 1.0,
        )
    if out is not second:
        second.copy_(out)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor as numbers of at least 32 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
