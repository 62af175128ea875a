"""The second moment V of Adam and its kin, held: which rounds renew it, how it moves, and how a step divides by it.

V moves by exact mean gradients, which every rank has, and so it is equal everywhere and costs no bytes:

    V = b2^n V + (1 - b2^n) r^2     r = mean of the ranks' gradients, n steps since the last such r

The optimizer stays what it is: before its step, its state is set so that its own formula divides by what is held.
:mod:`.family` knows the optimizers; :mod:`.held` does this where gradients are exchanged, :mod:`.update_moment` where
weight updates are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import ConfigError, StateError
from ...ops.checksums import on_its_device
from ..saved.checksums import is_number
from ..shards import local

# ---- how it moves, and how a step divides by it --------------------------------------------------

#: A divisor is at least this part of the root mean square of its row: an element that has hardly moved yet must
#: neither set its row's scale nor be divided by almost nothing.
FLOOR = 0.1
#: No element moves by more than so many learning rates in a step, as in Adam itself (Kingma and Ba 2015, section 2.1).
BOUND = 10.0
#: In a second moment that no exact gradient has moved yet, a coded one stands for so many steps, and all of them for at
#: most so many. Below 1 it is known by that: the first exact gradient takes their place.
BRIEF, MOST_BRIEF = 0.001, 0.5

#: What stands in for V in a row counts for nothing where it is less than this part of V's floor there.
NEGLIGIBLE = 1e-6

_OF_THE_SAME = "load the state of the same model"

#: What an optimizer's group of parameters has, and its state of one parameter.
Group = Mapping[str, Any]
State = Mapping[str, Any]
Slot = tuple[dict[str, Any], nn.Parameter, str]


def check_options(second_moment: str, **numbers: object) -> None:
    """Refuse options that have no meaning; a number that is None was not given.

    Raises:
        ConfigError: says which.
    """
    if second_moment not in ("auto", "shared", "own"):
        raise ConfigError(f'second_moment should be "auto", "shared" or "own", got {second_moment!r}')
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} should be a whole number, at least 1, got {value!r}")


def check_state(
    state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size], needs: Collection[str]
) -> None:
    """Refuse a saved second moment that is not of these parameters.

    Args:
        needs: the parts that one has to have beside the tensor.

    Raises:
        ConfigError: names the parameter.
    """
    for name, saved in state.items():
        moment = _moment_of(name, saved, needs)
        if name not in shapes:
            raise StateError(f"there is a saved second moment of {name}, and no such parameter; {_OF_THE_SAME}")
        if moment.shape != shapes[name]:
            raise StateError(
                f"the saved second moment of {name} should be of shape {tuple(shapes[name])}, got "
                f"{tuple(moment.shape)}; {_OF_THE_SAME}"
            )
        if not bool((moment >= 0).all()):
            raise StateError(
                f"the saved second moment of {name} should be at least 0, got {float(moment.min())}; load a state "
                "that was saved at a step that went well"
            )


def _moment_of(name: object, saved: object, needs: Collection[str]) -> Tensor:
    """Return the tensor of a saved second moment, whose other parts are numbers.

    Raises:
        StateError: it is malformed.
    """
    parts = dict(saved) if isinstance(saved, Mapping) else {}
    has_all = parts.keys() >= {*needs}
    moment, stand_in, divides = parts.pop("moment", None), parts.pop("stand_in", None), parts.pop("divides", False)
    fits = isinstance(moment, Tensor) and moment.dtype in (torch.float32, torch.float64)
    numbers = {*parts} <= {"steps", "since", "eps", "usual", "rule"}
    fits = fits and has_all and numbers and type(divides) is bool and all(map(is_number, parts.values()))
    fits = fits and (stand_in is None or _stands_in(stand_in, moment))
    if not fits or not parts["steps"]:
        raise StateError(
            f"the saved second moment of {name!r:.100} should be a dense tensor of at least 32 bits with its "
            f"{', '.join(needs)}, got {_in_words(saved):.200}; load what state_dict() returned"
        )
    assert isinstance(moment, Tensor)
    return moment


def _stands_in(given: object, moment: Tensor) -> bool:
    """Return whether this may stand in for rows of a second moment."""
    shape = [*moment.shape[:1], *[1] * (moment.dim() - 1)]
    if not isinstance(given, Tensor) or given.dtype is not moment.dtype or [*given.shape] != shape:
        return False
    return bool((given >= 0).all())


def tensors_of(saved: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return copies of the tensors of a saved second moment, on a device."""
    found = {name: part for name, part in saved.items() if isinstance(part, Tensor)}
    return {name: part.to(device, copy=True).contiguous() for name, part in found.items()}


def _in_words(saved: object) -> str:
    """Return the parts of a saved second moment, of which the tensor may be large."""
    if not isinstance(saved, Mapping):
        return repr(saved)
    kinds = {name: f"{p.dtype} of shape {tuple(p.shape)}" for name, p in saved.items() if isinstance(p, Tensor)}
    return ", ".join(f"{name}: {kinds.get(name) or repr(part)}" for name, part in saved.items())


@dataclass
class Moment:
    """The second moment of one parameter; equal on every rank, but for what stands in for it in update mode.

    Attributes:
        moment: V / (1 - b2^s), of at least 32 bits, contiguous.
        steps: s, the steps that it stands for.
        stand_in: what V counts for at least in every round, for each row, see :meth:`Form.begin_rows`; None for 0.
        floor: the same in compressed rounds, because of others in the row.
        zero_rows: the rows that have had no gradient when V moved, None until they are needed.
    """

    moment: Tensor
    steps: float
    stand_in: Tensor | None = field(default=None, kw_only=True)
    floor: Tensor = field(init=False)
    zero_rows: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.derive()

    def derive(self) -> None:
        """Find what follows from V."""
        several = self.moment.dim() > 1
        rows = self.moment.shape[0] if several else 1
        shape = (rows, *[1] * (self.moment.dim() - 1)) if several else ()
        self.floor = (mean_power(self.moment, 1, rows) * FLOOR**2).to(self.moment.dtype).view(shape)
        self.zero_rows = None

    def least(self, *, exact: bool) -> Tensor | None:
        """Return what V counts for at least in a step, for each row; None for nothing.

        Args:
            exact: divide by V without :data:`FLOOR`.
        """
        if self.stand_in is None:
            return None if exact else self.floor
        return self.stand_in if exact else torch.maximum(self.floor, self.stand_in)

    def squares(self, *, exact: bool = False) -> Tensor:
        """Return the squares of what a step divides by, but for eps, which the optimizer adds itself."""
        least = self.least(exact=exact)
        return self.moment.clone() if least is None else torch.maximum(self.moment, least)

    def state(self) -> dict[str, Any]:
        """Return what has to be saved: the arguments of another one. The tensor ``moment`` is the one in use."""
        more = {} if self.stand_in is None or not bool(self.stand_in.any()) else {"stand_in": self.stand_in.clone()}
        return more | {"moment": self.moment, "steps": self.steps}

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


def mean_power(values: Tensor, power: int, rows: int = 1) -> Tensor:
    """Return the mean of ``|x| ** power`` of each row, float64; equal on all ranks.

    Torch sums in an order that depends on its number of threads, which ranks need not share.
    """
    sums = torch.zeros(rows, dtype=torch.float64, device=values.device)
    if not values.numel():
        return sums
    length = values.numel() // rows
    with on_its_device(values):
        ops.norm_offer_all([values.view(-1)], [sums], [length], power=power)
    return sums.div_(length)


def _largest(values: Tensor, held: Moment) -> Tensor:
    """Return the largest ``|x|`` of each row that has had no gradient when V moved; what is not finite counts as 0."""
    found, rows = torch.zeros_like(held.floor), held.zero_rows
    if rows is None or not rows.numel():
        return found
    few = 3 * rows.numel() < len(values)  # most often: then only these are read
    among = (values.index_select(0, rows) if few else values).contiguous()
    peaks = torch.empty(len(among), dtype=torch.promote_types(among.dtype, torch.float32), device=among.device)
    with on_its_device(among):
        ops.norm_offer_all([among.view(-1)], [peaks], [among.numel() // len(among)])
    found.view(-1).index_copy_(0, rows, (peaks if few else peaks[rows]).to(found.dtype))
    return found


def places(optimizer: Any, names: Mapping[int, str]) -> Iterator[Slot]:
    """Return the parameters of an optimizer that have a name, each with its group.

    Args:
        names: by the parameter's id.
    """
    for group in optimizer.param_groups:
        yield from ((group, parameter, names[id(parameter)]) for parameter in group["params"] if id(parameter) in names)


def names_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """Return names by the parameter's id."""
    return {id(parameter): name for name, parameter in named}


@dataclass(frozen=True)
class Form:
    """Where an optimizer keeps its second moment, and what it makes of it; by default as Adam does.

    Attributes:
        second: the state that it divides by the root of: a running mean of squares.
        first: the state that it divides; empty for the gradient itself.
        decay: the option that says how fast the mean forgets; empty for the second of ``betas``.
        count: the option in which a group counts its steps; empty where each parameter's state has ``step``.
        decoupled: weight decay never enters the moments.
        unbiased: it divides the bias out of the mean.
        left: of the square that a gradient adds to the second moment, at least this part stays there in :meth:`write`;
            the rest may be taken off beforehand. Below 1 the state may be less than nothing until the step is done,
            with this very gradient. In 16 bits all of it stays.
    """

    second: str = "exp_avg_sq"
    first: str = "exp_avg"
    decay: str = ""
    count: str = ""
    decoupled: bool = False
    unbiased: bool = True
    left: float = 1.0

    def steps(self, group: Group, state: State) -> float:
        """Return how many steps the optimizer has done with a parameter."""
        return float(group[self.count] if self.count else state["step"])

    def betas(self, group: Group) -> tuple[float, float]:
        """Return how fast what is divided forgets, and how fast the second moment does."""
        return (
            float(group["betas"][0]) if self.first else 0.0,
            float(group[self.decay] if self.decay else group["betas"][1]),
        )

    def gradient(self, optimizer: Any, group: Group, parameter: nn.Parameter, by: float = 1.0) -> Tensor:
        """Return the gradient, which counts so many times, as the moments see it."""
        assert parameter.grad is not None
        grad = wide(parameter.grad) if by == 1.0 else wide(parameter.grad) * by
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a gradient scaler leaves it to a fused step
            grad = grad / scale
        grad = -grad if group.get("maximize", getattr(optimizer, "maximize", False)) else grad
        # Groups say themselves which decay it is from torch 2.7 on.
        decoupled = self.decoupled or group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if group["weight_decay"] and not decoupled:
            grad = grad.add(local(parameter), alpha=float(group["weight_decay"]))
        return grad

    def taken_over(self, group: Group, state: State) -> tuple[Tensor, float]:
        """Return the second moment that an optimizer has made itself, and the steps that it stands for."""
        steps = self.steps(group, state)
        return self.corrected(group, state, steps), steps

    def corrected(self, group: Group, state: State, steps: float) -> Tensor:
        """Return the mean of squares, after that many steps, without its bias."""
        return (wide(state[self.second]) / (1 - self.betas(group)[1] ** steps)).contiguous()

    def move(self, held: Moment, group: Group, grad: Tensor, steps: float) -> None:
        """Let V take in an exact mean gradient, for all steps since the last one."""
        held.move(grad, self.betas(group)[1], steps)

    def take_coded(self, held: Moment, group: Group, grad: Tensor) -> None:
        """Let V, which no exact gradient has moved yet, take in a coded one; zeros before count for nothing."""
        held.steps = min(held.steps, MOST_BRIEF - BRIEF) if held.steps < 1 else 0.0
        self.move(held, group, grad, BRIEF)

    def begin_rows(
        self, held: Moment, group: Group, state: State, parameter: nn.Parameter, now: float, by: float = 1.0
    ) -> None:
        """Let rows that have had no gradient when V moved count for what the optimizer's own V would be there.

        Else a gradient that comes before V moves again would move its row by :data:`BOUND` learning rates, for as long
        as the first moment has anything of it. V itself stays 0: so it shows which elements have had no exact gradient.
        Once V has one of a row, what stands in there fades like the square of the first moment.

        Args:
            parameter: with the gradient of this step, which counts so many times; each row for its largest element,
                as a code may send few.
            now: the number of this step.
        """
        if held.moment.dim() < 2 or not held.moment.numel():
            return
        if held.zero_rows is None:
            held.zero_rows = (held.floor.view(-1) == 0).nonzero().view(-1)
            if held.stand_in is not None and not bool(held.stand_in.any()):
                held.stand_in = None
        if held.stand_in is None and not held.zero_rows.numel():
            return
        assert parameter.grad is not None
        before = self._remembered(held, group, state, now - 1) if held.stand_in is None else held.stand_in
        own = Moment(before.clone(), now - 1)
        self.move(own, group, _largest(local(parameter.grad), held).mul_(by), 1.0)
        faded = before * self.betas(group)[0] ** 2
        faded *= faded > NEGLIGIBLE * held.floor
        held.stand_in = torch.where(held.floor == 0, own.moment, faded).clamp_(max=torch.finfo(faded.dtype).max)

    def _remembered(self, held: Moment, group: Group, state: State, steps: float) -> Tensor:
        """Return what begins to stand in for V: the square of what the first moment has of a row, after some steps.

        It has something where a state was loaded that lacks what stood in: one of an earlier version, or of other
        shards.
        """
        first = state.get(self.first)
        if first is None or not steps:
            return torch.zeros_like(held.floor)
        return _largest(local(first), held).div_(1 - self.betas(group)[0] ** steps).square_()

    def forget(self, held: Moment, group: Group) -> None:
        """Let V be what it begins with."""
        held.steps = 0.0
        held.moment.zero_()

    def clear_first(self, state: State) -> None:
        """Let the first moment be what it begins with."""
        if self.first:
            moment = local(state[self.first])
            with torch.inference_mode(moment.is_inference()):  # of a program that makes its steps so
                moment.zero_()

    def write(self, group: Group, state: State, grad: Tensor, held: Moment, now: float, *, exact: bool = False) -> None:
        """Set the second moment so that step number ``now``, with this gradient, divides by V's root, plus eps.

        Or by more, where an element would move by more than :data:`BOUND` learning rates, and where this gradient is
        many times that root: the optimizer adds its square to what it is given.

        Without ``unbiased``, what is divided by is less by the bias, as in the optimizer's own step.

        Args:
            exact: divide by V without :data:`FLOOR`.
        """
        second, first = local(state[self.second]), (wide(state[self.first]) if self.first else grad).contiguous()
        out = second if second.dtype is first.dtype and second.is_contiguous() else torch.empty_like(first)
        (beta1, beta2), least = self.betas(group), held.least(exact=exact)
        with on_its_device(out):
            ops.adam_hold_all(
                [out.view(-1)],
                [first.view(-1)],
                [grad.contiguous().view(-1)],
                [held.moment.view(-1)],
                None if least is None else [least.view(-1)],
                betas=(beta1, beta2),
                step=now,
                bound=BOUND if self.unbiased else BOUND * math.sqrt(1 - beta2**now),
                left=self.left if second.element_size() > 2 else 1.0,
            )
        if out is not second:
            second.copy_(out)


#: That of Adam and AdamW.
ADAM = Form()


def wide(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as numbers of at least 32 bits."""
    return (tensor := local(tensor)).to(torch.promote_types(tensor.dtype, torch.float32))
