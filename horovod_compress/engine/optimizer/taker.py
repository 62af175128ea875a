"""One of the optimizers that take the results of a compression, with all that depends on it.

Several optimizers may share a compression, as those of an embedding and of the layers above it do: each takes care of
its own parameters before its own step. What they cannot have for themselves is in :func:`.held.begin`, which chooses
one kind of round for all, and in :class:`~horovod_compress.engine.norms.Norms`: one ratio for all results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ..methods import Methods
from ..reducer import Reducer
from . import held, holding, momentum, sgd
from .family import form_of, is_exactly, may_share, options_of
from .held_moment import Left
from .matching import Matching
from .momentum import Rates
from .second_moment import names_of, places
from .step_hooks import builds_state, prepare_last, uncompiled, unprepared

Named = Sequence[tuple[str, nn.Parameter]]
#: Learning rates by group, or by parameter.
SavedRates = Sequence[float] | Mapping[str, float]


class Taker:
    """An optimizer, its second moment, the norm of what it gets, and its learning rates.

    Attributes:
        held: the second moment, where that is shared.
        sgd: moves the weights, where that is ours to do and no second moment is held.
        matching: takes out of results what they are handed back times.
        rates: what is kept follows these.
        stepped: its held second moment has used an exchange since it last went on with what was loaded.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.stepped = optimizer, False
        self.held: held.HeldSecondMoment | None = None
        self.sgd: sgd.SgdStepping | None = None
        self.matching: Matching | None = None
        self.rates: list[Rates] = []

    def meet(
        self,
        reducer: Reducer,
        named: Named,
        options: Sequence[Any],
        scale: Callable[[], float] | None,
        *,
        full_precision_every: int,
        step: str,
    ) -> None:
        """Look at the optimizer.

        Args:
            named: the parameters that are exchanged, of any optimizer.
            options, full_precision_every, step: see :func:`.holding.hold`.
            scale: returns that of the gradient scaler; None for results that are handed back as they are.

        Raises:
            ConfigError: it does not fit the method, or the options do not fit it.
        """
        optimizer = self.optimizer
        self.leave()
        self.stepped = False
        self.held = holding.hold(optimizer, reducer, named, full_precision_every, *options, step=step)
        self.sgd = sgd.stepping_of(optimizer, reducer, dict(named), step)
        self.matching = Matching(optimizer, reducer, dict(named), scale) if scale else None
        self.rates = momentum.rates_of(optimizer, reducer.kept, named, reducer.options.follow_lr)

    @property
    def steps(self) -> bool:
        """Whether weights are moved here, where that is possible."""
        return bool(self.sgd or (self.held and self.held.stepping))

    def prepare(self) -> None:
        """Before the optimizer's own step, let gradients and state be what its formula is to have, or move weights."""
        if self.held and self.held.unused(self.held.reducer.next_step()):  # else what was loaded stands
            self.stepped = True
        here = self.held.moved_here() if self.held else self.sgd.chosen_now() if self.sgd else frozenset()
        ratios = self.matching.take_out(here) if self.matching else {}
        if self.held:
            self.held.prepare(here, ratios)
        elif self.sgd:
            self.sgd.prepare(ratios)

    def resume(self) -> None:
        """Go on with whatever was loaded."""
        self.stepped = False
        if self.sgd:
            self.sgd.resume()

    def leave(self) -> None:
        """Let the optimizer's state be as torch alone would have it, and torch do all further steps."""
        if self.held:
            self.held.leave()
        if self.sgd:
            self.sgd.end()
            self.sgd = None


# ---- all of them ---------------------------------------------------------------------------------


class Takers:
    """All optimizers of one compression, in the order in which they were given."""

    def __init__(self) -> None:
        self._seen: list[Taker] = []  # of optimizers that were looked at, perhaps in vain
        self._known: list[Taker] = []
        self._stepped: set[int] = set()  # which of them have made a step since the weights were looked at
        self._handles: list[Any] = []  # of hooks that note these steps
        self._last: Any = None  # of them to do so

    def __iter__(self) -> Iterator[Taker]:
        return iter(self._known)

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def optimizers(self) -> list[Any]:
        return [taker.optimizer for taker in self]

    @property
    def held(self) -> list[held.HeldSecondMoment]:
        """The second moments that are shared."""
        return [taker.held for taker in self if taker.held]

    def linear(self, named: Named) -> frozenset[str]:
        """Return the parameters that move by steps that are linear in the results: those of SGD."""
        names, optimizers = names_of(named), [one for one in self.optimizers if is_exactly(one, torch.optim.SGD)]
        return frozenset(name for optimizer in optimizers for _, _, name in places(optimizer, names))

    def of(self, optimizers: Sequence[Any], methods: Methods, named: Named) -> list[Taker]:
        """Return what is made for each optimizer once, as the hook of its steps is; they are not known yet.

        Raises:
            ConfigError: others are known, or two have the same parameter, or momentum upon that of a method.
        """
        if self and [*map(id, self.optimizers)] != [*map(id, optimizers)]:
            raise ConfigError(
                f"this compression already has an optimizer, {kinds_of(self.optimizers)}; give several in one call, "
                "such as attach(first, second); to replace an optimizer, create model, compression and optimizer again"
            )
        _refuse_shared(optimizers, named)
        found = []
        for optimizer in optimizers:
            taker = next((taker for taker in self._seen if taker.optimizer is optimizer), None)
            if taker is None:
                self._seen.append(taker := Taker(optimizer))
            prepare_last(optimizer, taker.prepare)
            momentum.refuse_twice(optimizer, methods, named)
            found.append(taker)
        return found

    def know(self, takers: list[Taker], look: Callable[[], None] | None) -> None:
        """Know these from now on.

        Args:
            look: looks at the weights, once all of them have made a step; None where nobody does.
        """
        if look and not self:
            for taker in takers:
                note = uncompiled(partial(self._note_step, look))
                self._handles.append(taker.optimizer.register_step_post_hook(note))
        self._known = takers

    def release(self) -> None:
        """Leave all optimizers without a hook of these, for others that take their place."""
        for taker in self._seen:
            taker.leave()
            unprepared(taker.optimizer, taker.prepare)
        for handle in self._handles:
            handle.remove()

    def _note_step(self, look: Callable[[], None], optimizer: Any, *given: Any) -> None:
        if builds_state() or (optimizer is self._last and len(self._known) > 1):
            return  # or Horovod's optimizer calls torch's: a hook comes twice
        self._last = optimizer
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._known):
            self._stepped.clear()
            look()

    def options(self) -> dict[str, str]:
        """Return what :func:`.family.options_of` says of each optimizer, by names that differ."""
        found: dict[str, str] = {}
        for number, optimizer in enumerate(self.optimizers):
            where = f" of optimizer {number}" if len(self._known) > 1 else ""
            found |= {name + where: value for name, value in options_of(optimizer).items()}
        return found

    # ---- state ----

    def rates(self) -> Mapping[str, SavedRates]:
        """Return the rates that what is kept stands for, by what follows them.

        Those of one optimizer are by group, as its own state is. Several may be given in another order after a resume:
        theirs are by parameter.
        """
        each = [rates for taker in self for rates in taker.rates]
        if len(self._known) == 1:
            return {saved: state for rates in each for saved, state in rates.state().items()}
        found: dict[str, dict[str, float]] = {}
        for saved, by_name in (part for rates in each for part in rates.by_name().items()):
            found.setdefault(saved, {}).update(by_name)
        return found

    def load_rates(self, saved: Mapping[str, SavedRates]) -> None:
        """Take what :meth:`rates` returned.

        Raises:
            StateError: it does not fit these optimizers.
        """
        for rates, state in self.find_rates(saved):
            rates.load(state)

    def find_rates(self, saved: Mapping[str, SavedRates]) -> list[tuple[Rates, dict[str, list[float]]]]:
        """Return what follows rates, each with its part of what was saved, by group.

        Raises:
            StateError: it does not fit these optimizers.
        """
        found = []
        left = {name: iter(() if isinstance(rates, Mapping) else rates) for name, rates in saved.items()}
        for taker in self:
            # The last one takes what is left: a group may be added later.
            count = None if taker is self._known[-1] else len(taker.optimizer.param_groups)
            for rates in taker.rates:
                mine = {}
                for name in rates.saved:
                    named, rest = saved.get(name), left.get(name, iter(()))
                    mine[name] = rates.of_names(named) if isinstance(named, Mapping) else [*islice(rest, count)]
                found.append((rates, mine))
        return found

    def load_moments(self, moments: Mapping[str, Mapping[str, Any]], due: bool, left: Mapping[str, Left]) -> None:
        """Let these second moments be held, as far as they are shared; see :meth:`.held.HeldSecondMoment.left`.

        Args:
            due: an exact round is due: for all of them, unless it says there for which ones.
        """
        due = due and not any("due" in mine for mine in left.values())
        for one in self.held:
            one.load_state_dict(moments, due, left)

    def left(self) -> dict[str, Left]:
        """Return what :meth:`load_moments` takes of exchanges that optimizers have not used."""
        some = not all(one.due for one in self.held)  # of two that step in turn, one may have an exact round due
        return {name: numbers for one in self.held for name, numbers in one.left(due=some).items()}

    def load_added_to(self, saved: Mapping[str, Sequence[bool]]) -> None:
        """Take what :meth:`added_to` returned."""
        for matching in (taker.matching for taker in self if taker.matching):
            matching.load(saved)

    def added_to(self) -> dict[str, list[bool]]:
        """Return which of the last exchanges came upon earlier results, see :meth:`.matching.Matching.state`."""
        each = [taker.matching.state() for taker in self if taker.matching]
        return {name: found for mine in each for name, found in mine.items()}

    def unheld(self, moments: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return those of these second moments that no optimizer holds, as it is of another kind than when saved."""
        held = {name for mine in self.held for name in mine.names()}
        return {name: moment for name, moment in moments.items() if name not in held}

    def moments(self, copy: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Any]]:
        """Return the second moments that are held, by parameter."""
        found = {name: state for mine in self.held for name, state in mine.state_dict().items()}
        return {name: state | {"moment": copy(state["moment"])} for name, state in found.items()}

    def may_hold(self, named: Named) -> list[str]:
        """Return the parameters whose second moment may be held, as far as optimizers go; the same on all ranks."""
        names, takers = names_of(named), [taker for taker in self if taker.held or may_share(taker.optimizer, "auto")]
        return [name for taker in takers for _, _, name in places(taker.optimizer, names)]

    def own_moments(self, named: Named, held: Collection[str]) -> dict[str, Tensor]:
        """Return the second moments of the others of these, as their optimizers have them after a first step."""
        found, may, names = {}, {*self.may_hold(named)} - {*held}, names_of(named)
        for optimizer in self.optimizers:
            for group, parameter, name in places(optimizer, names) if may else ():
                state, form = optimizer.state.get(parameter), form_of(optimizer) if name in may else None
                if form and state and form.steps(group, state):
                    found[name], _ = form.taken_over(group, state)
        return found


def refuse_lists(optimizers: Iterable[object]) -> None:
    """Refuse a list in place of optimizers.

    Raises:
        ConfigError: says how to give several.
    """
    for given in optimizers:
        if isinstance(given, (list, tuple)):
            raise ConfigError(
                f"attach() takes several optimizers as arguments, got a {type(given).__name__} of {len(given)}; write "
                "attach(first, second), or attach(*optimizers)"
            )


def kinds_of(optimizers: Iterable[Any]) -> str:
    """Return the classes of optimizers, in words."""
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers)


def _refuse_shared(optimizers: Iterable[Any], named: Named) -> None:
    """Refuse optimizers that would move the same parameter."""
    names, seen = names_of(named), set[int]()
    for optimizer in optimizers:
        found = {id(parameter): name for _, parameter, name in places(optimizer, names)}
        if both := sorted(found[key] for key in seen & found.keys()):
            raise ConfigError(
                f"two optimizers have {both[0]}, and {len(both)} parameter(s) in all: each would move it with the same "
                "gradient; give every parameter to one of them"
            )
        seen |= found.keys()
