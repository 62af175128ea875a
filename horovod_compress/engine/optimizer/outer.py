"""The outer optimizer of update mode: it steps on the common weights, with the mean update as its gradient.

DiLoCo (Douillard et al. 2023, algorithm 1) takes what local steps have made of the weights for a gradient, with the
sign turned round, and gives it to SGD with Nesterov's momentum. Any optimizer of torch's will do. All ranks give theirs
the same numbers, so that its state is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError, StateError
from .family import OF_OPTIMIZER, options_of

#: Makes an optimizer of parameters, as the classes of ``torch.optim`` do.
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Outer:
    """An optimizer of the common weights.

    Args:
        factory: called with these weights as parameters, in the order of the plan; or options of SGD.
        common: the common weights; it changes them in place.

    Raises:
        ConfigError: what it returns cannot step on them.
    """

    def __init__(self, factory: Factory | Mapping[str, Any], common: Sequence[Tensor]) -> None:
        self._weights = [nn.Parameter(weights) for weights in common]  # of the same memory
        self.optimizer = self._made(factory)

    def _made(self, factory: Factory | Mapping[str, Any]) -> torch.optim.Optimizer:
        if isinstance(factory, torch.optim.Optimizer) or not (callable(factory) or isinstance(factory, Mapping)):
            raise ConfigError(
                "outer_optimizer should be what makes an optimizer of the common weights, such as "
                f"functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), got {factory!r:.200}"
            )
        try:
            made = torch.optim.SGD(self._weights, **factory) if isinstance(factory, Mapping) else factory(self._weights)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            raise ConfigError(f"outer_optimizer cannot be made: {type(error).__name__}: {error}") from error
        if not isinstance(made, torch.optim.Optimizer) or isinstance(made, torch.optim.LBFGS):
            raise ConfigError(
                "outer_optimizer should return an optimizer of torch.optim that steps without a closure, got "
                f"{made!r:.200}"
            )
        theirs = [id(parameter) for group in made.param_groups for parameter in group["params"]]
        if sorted(theirs) != sorted(map(id, self._weights)):
            raise ConfigError("outer_optimizer should have all the parameters that it is given, and no others")
        return made

    def step(self, means: Mapping[int, Tensor]) -> None:
        """Step with mean updates, which are overwritten; weights without one stay where they are.

        Args:
            means: by number.
        """
        for index, mean in means.items():
            self._weights[index].grad = mean.neg_()
        self.optimizer.step()
        for index in means:
            self._weights[index].grad = None

    def shown(self) -> dict[str, str]:
        """Return its class and options, by name, for a comparison with other ranks."""
        found = options_of(self.optimizer).items()
        return {f"the outer optimizer's {name.removeprefix(OF_OPTIMIZER)}": value for name, value in found}

    def tensors(self) -> Iterator[Tensor]:
        """Return what it keeps."""
        for weights in self._weights:
            kept = self.optimizer.state.get(weights, {})
            yield from (kept[name] for name in sorted(kept) if isinstance(kept[name], Tensor))

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return what it keeps, by names that are texts, in copies."""
        state = self.optimizer.state_dict()
        kept = {str(index): {n: _copied(v) for n, v in mine.items()} for index, mine in state["state"].items()}
        return {"state": kept, "groups": [dict(group) for group in state["param_groups"]]}

    def check(self, state: Any) -> None:
        """Refuse a state that :meth:`state_dict` did not return, or of other weights.

        Raises:
            StateError: says what was expected.
        """
        parts = state if isinstance(state, Mapping) else {}
        groups, kept = parts.get("groups"), parts.get("state")
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        fits = isinstance(groups, list) and [len(group.get("params", ())) for group in groups] == sizes
        if not fits or not isinstance(kept, Mapping) or not _fit(kept, self._weights):
            raise StateError(
                "the saved state of update mode has no outer optimizer, or one of other weights; resume with the same "
                "outer_optimizer and model"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned and :meth:`check` accepted."""
        kept = {int(index): {n: _copied(v) for n, v in mine.items()} for index, mine in state["state"].items()}
        self.optimizer.load_state_dict({"state": kept, "param_groups": [dict(group) for group in state["groups"]]})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _fit(kept: Mapping[str, Any], weights: Sequence[Tensor]) -> bool:
    """Return whether what is kept is of these weights: one number, one for each element, or for each row or column."""

    def tensors(mine: Any) -> Iterable[Tensor]:
        return (value for value in mine.values() if isinstance(value, Tensor) and value.dim())

    def fits(value: Tensor, of: Tensor) -> bool:
        rows = value.dim() == of.dim() and all(
            size in (1, most) for size, most in zip(value.shape, of.shape, strict=True)
        )
        return rows or value.numel() in (1, of.numel())

    return all(
        index.isdecimal()
        and int(index) < len(weights)
        and isinstance(mine, Mapping)
        and all(fits(value, weights[int(index)]) for value in tensors(mine))
        for index, mine in kept.items()
    )
