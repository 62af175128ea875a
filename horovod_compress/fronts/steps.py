"""What begins a step, between two of which nothing is under way: all that ranks have to do alike, on every rank.

An adaptive schedule may choose other buckets, parameters may be frozen, residuals follow the learning rate and the
scale of gradients, a second moment chooses between exact and compressed rounds, and the weights are looked at.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.agreement import differences
from ..engine.masks import Masks, check_masks
from ..engine.methods import Methods
from ..engine.optimizer import held, momentum
from ..engine.optimizer.family import tell_unused
from ..engine.optimizer.held_moment import Left, give_back
from ..engine.optimizer.momentum import LastRates, Rates
from ..engine.optimizer.saved_moments import check_state as check_moments
from ..engine.optimizer.step_hooks import prepare_last
from ..engine.optimizer.taken_back import TakenBack
from ..engine.optimizer.taker import SavedRates, Takers
from ..engine.optimizer.unknown import UnknownOptimizers
from ..engine.reducer import Next, Reducer
from ..engine.saved import checkpoint
from ..engine.shards import local
from ..engine.tuning import Share, Tuner
from ..errors import ConfigError, StateError
from ..options import plain
from ..schedule.by_name import is_adaptive
from .scale import Scale

Named = Sequence[tuple[str, nn.Parameter]]

_log = logging.getLogger("horovod_compress")


@dataclass
class _Loaded:
    """What was loaded, for an optimizer that is not known yet."""

    moments: Mapping[str, Any] = field(default_factory=dict)
    due: bool = False  # an exact round
    left: Mapping[str, Left] = field(default_factory=dict)  # exchanges that it has not used
    rates: dict[str, SavedRates] = field(default_factory=dict)  # that what is kept stands for
    added_to: Mapping[str, list[bool]] = field(default_factory=dict)  # which exchanges came upon earlier results
    is_new: bool = False  # no gradient has come yet, and optimizers may be given other groups before


class Steps:
    """Begins the steps of one compression.

    Args:
        given: the parameters that the compression was given, with those that were frozen then.
        share: joins all ranks, for an adaptive schedule; must not wait for ever.

    Attributes:
        named: the parameters that are exchanged.
        parameters: in the order of the plan.
        index: their places in it, by identity.
        sparse: the names of those whose gradients are sparse, where a module says so beforehand.
        note_step: notes an optimizer that is about to make a step, if it is none of ours and uses our results.
        tuner: chooses buckets, where the schedule is an adaptive one.
    """

    def __init__(self, reducer: Reducer, methods: Methods, given: Named, share: Share) -> None:
        self._reducer, self._methods = reducer, methods
        self._buckets, self._norms = reducer.buckets, reducer.norms
        self._verification = verification = reducer.verification
        exchanged = frozenset(reducer.plan.names())
        self.named = [(name, parameter) for name, parameter in given if name in exchanged]
        self.sparse: list[str] = []
        self.scale = Scale(reducer)
        self._takers = Takers()
        self.note_step = UnknownOptimizers(reducer, self.named, self._takers).look
        self._taken_back = TakenBack(reducer, self._takers)
        self._exact_first = 0  # so many first steps are exact
        self._loaded = _Loaded()
        if reducer.world > 1:
            verification.watch_weights()
        masked = {name: parameter for name, parameter in self.named if methods.is_masked(name)}
        self._masks = Masks(reducer.kept, reducer.start.mask, masked) if masked else None
        self.tuner: Tuner | None = None
        if is_adaptive(schedule := reducer.options.schedule):
            self.tuner = Tuner(reducer, str(schedule), share, methods, reducer.options.warmup_steps or 0)
        self._take_order()

    def _take_order(self) -> None:
        """Number the parameters as the plan has them, and say which of them SGD moves."""
        by_name = dict(self.named)
        self.parameters = [by_name[name] for name in self._reducer.plan.names()]
        self.index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._buckets.set_linear(self._takers.linear(self.named))

    # ---- the optimizers ----

    @property
    def met(self) -> bool:
        """Whether an optimizer is known."""
        return bool(self._takers)

    @property
    def optimizers(self) -> list[Any]:
        """Those that are known."""
        return self._takers.optimizers

    @property
    def held(self) -> held.HeldSecondMoment | None:
        """The second moment that is shared; of several optimizers, the first one's."""
        return next(iter(self._takers.held), None)

    def meet(self, optimizers: Sequence[Any], *options: Any, match_norm: bool = True, step: str = "auto") -> None:
        """Look at the optimizers that take the results: momentum, second moment, the norm of what they get.

        Args:
            optimizers: all of them; in a second call the same ones.
            options: see :func:`~horovod_compress.engine.optimizer.holding.hold`.
            match_norm: hand results back with the norm of the exact mean, see :mod:`~horovod_compress.engine.norms`.
            step: who moves the weights, "auto" or "torch".

        Raises:
            ConfigError: one does not fit the method, or the options do not fit it, or two have the same parameter.
        """
        reducer, takers = self._reducer, self._takers.of(optimizers, self._methods, self.named)
        texts = [momentum.advice(optimizer, self._methods, self.named) for optimizer in optimizers]
        tells = not self.met and reducer.rank == 0 and not reducer.step
        if tells and (text := next(filter(None, texts), None)):
            _log.warning("%s", text)
        match_norm = plain(match_norm)
        if not isinstance(match_norm, bool):
            raise ConfigError(f"match_norm should be True or False, got {match_norm!r}")
        full = 0  # where the methods differ in that, too
        with contextlib.suppress(ConfigError):
            full = self._methods.full_precision_every()
        scale = self.scale.value if match_norm else None
        for taker in takers:
            self._norms.follow((), by=id(taker.optimizer))
            taker.meet(reducer, self.named, [*map(plain, options)], scale, full_precision_every=full, step=step)
            self._taken_back.follow(taker.optimizer)
        self._takers.know(takers, self._take_weights if self._verification.weights else None)
        if tells and not self.held and reducer.world > 1:
            rounds = dict(zip(("warmup_steps", "rebuild_every"), options[1:], strict=False))
            tell_unused(rounds, of_all=reducer.options.warmup_steps is not None)
        self._take_order()
        if reducer.options.warmup_steps is None:
            self._begin_exact()
        self._take_loaded()
        if self.held and self.tuner:
            self.tuner.wait_for(self.held.rounds.warmup)

    def leave(self) -> None:
        """Let the optimizers' state be as torch alone would have it."""
        for taker in self._takers:
            taker.leave()

    def release(self) -> None:
        """Leave the optimizers to the steps of other ranks."""
        self._takers.release()
        self._taken_back.release()

    def _begin_exact(self) -> None:
        """Let the first steps be exact where that is needed."""
        if self._buckets.alone:  # all are
            return
        # Where a second moment is held, its own exact rounds come first.
        total = self._reducer.options.total_steps
        each = [momentum.exact_first(taker.optimizer, self._methods, self.named, total) for taker in self._takers]
        mine = 0 if self.held else max(each)
        self._exact_first = max(self._exact_first, mine)
        if mine and self._reducer.rank == 0 and not self._reducer.step:
            _log.info(
                "the first %d steps are exact: with momentum, compression of their "
                "large gradients could make training diverge; warmup_steps= sets another number",
                self._exact_first,
            )
        if self._exact_first and self.tuner:
            self.tuner.wait_for(self._exact_first)

    def divisors(self) -> dict[str, Tensor]:
        """Return what gradients are divided by before they are encoded, and what waits with them, flat and by name."""
        return {name: divisor for one in self._takers.held for name, divisor in one.divisors().items()}

    def may_hold(self) -> list[str]:
        """Return the parameters whose second moment may be held, be it where their buckets are compressed only."""
        names = self._takers.may_hold(self.named)
        return [name for name in names if self._methods.codec(name).properties().divides != "never"]

    def divides(self) -> Mapping[str, str]:
        """Return, by tensor, where a second moment that is held divides."""
        return self._buckets.divides()

    def own_moments(self, held: Collection[str]) -> dict[str, Tensor]:
        """Return the second moments of the others of these, which are their optimizers' own."""
        return self._takers.own_moments(self.named, held)

    def second_moment(self) -> str:
        """Return whose the second moment is, in words that have to be equal on every rank."""
        first = f", with {self._exact_first} exact steps first" if self._exact_first else ""
        return "; ".join(one.settings() for one in self._takers.held) or f"its own{first}"

    def options(self) -> dict[str, str]:
        """Return what else the optimizer does, by name, in words that have to be equal on every rank."""
        told = {differences.RESULT_SCALE: f"{self._reducer.result_scale:g}"}
        told |= self._takers.options()
        return told | {differences.WHO_STEPS: "auto" if any(taker.steps for taker in self._takers) else "torch"}

    def settle_moments(self) -> None:
        """Where a second moment was loaded that nobody holds, let what waits be in the units of gradients again."""
        if self._stands():
            self._take_loaded()
        self._loaded.is_new = False
        if unheld := self._takers.unheld(self._loaded.moments):
            give_back(unheld, self._reducer.kept)
        self._loaded.moments, self._loaded.due, self._loaded.left = {}, False, {}

    def _stands(self) -> bool:
        """Return whether what was loaded still stands: since then no gradient has come, and no step was made."""
        return self._loaded.is_new and not any(taker.stepped for taker in self._takers)

    def _take_loaded(self) -> None:
        """Let optimizers that are known take what was loaded for them."""
        self._takers.load_moments(self._loaded.moments, self._loaded.due, self._loaded.left)
        self._takers.load_rates(self._loaded.rates)
        self._takers.load_added_to(self._loaded.added_to)

    def is_exact(self, step: int) -> bool:
        """Return whether a step of gradients is exact by the options; a schedule may leave more uncompressed."""
        if self.held:
            return self.held.is_exact(step)
        return step < self._exact_first or self._methods.is_exact(step)

    def foresees(self) -> bool:
        """Return whether :meth:`is_exact` is for steps far ahead too: a user's function need not be."""
        return bool(self.held) or not self._methods.asks()

    # ---- a step ----

    @property
    def frozen(self) -> list[nn.Parameter]:
        """Return the parameters that need no gradient in the step under way."""
        return [self.parameters[index] for index in sorted(self._buckets.frozen)]

    def begin(self) -> bool:
        """Begin a step, before its first gradient is offered; return whether the parameters have other numbers now."""
        reducer = self._reducer
        reducer.settled()  # nobody has waited for a last bucket of sparse gradients only
        self._taken_back.begin()
        self.scale.bridge()
        changed = bool(self.tuner and self.tuner.begin_step())
        if changed:
            self._take_order()
        reducer.freeze(index for index, parameter in enumerate(self.parameters) if not parameter.requires_grad)
        if self._masks:
            self._masks.begin()
        self._norms.ratio.expect(max([1.0, *(rates.begin() for taker in self._takers for rates in taker.rates)]))
        for taker in self._takers:
            prepare_last(taker.optimizer, taker.prepare)
        if several := self._takers.held:
            held.begin(several, reducer.next_step())
        if self._exact_first:
            self._buckets.choose(Next("short" if reducer.next_step() < self._exact_first else "method"))
        for taker in self._takers:
            if taker.matching:
                taker.matching.begin()
        self._norms.begin(reducer.next_step(), exact=bool(self.held and self.held.exact))
        self._show()
        self._take_weights()
        return changed

    def _show(self) -> None:
        """Show the other ranks what this one decodes with."""
        reducer = self._reducer
        if reducer.world == 1:
            return
        shown: dict[str, object] = {differences.RESULT_SCALE: reducer.result_scale}
        if self.held:
            shown[differences.ROUND] = "exact" if self.held.exact else "compressed"
            shown[differences.SECOND_MOMENT] = "; ".join(one.shown() for one in self._takers.held)
        shown[differences.GRADIENT_SCALE] = self.scale.followed()
        shown[differences.RATIO] = self._norms.ratio.used()
        reducer.kept.show(reducer.next_step(), shown)

    def _take_weights(self) -> None:
        """Look at the weights of the next step, if they are compared there."""
        if self._verification.weights and self._reducer.idle():
            self._verification.take_weights(self._reducer.next_step(), [*map(local, self.parameters)])

    # ---- state ----

    def state(self, copy: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Any]:
        """Return what is saved beside that of the reducer."""
        tuned = {"tuned": self.tuner.chosen} if self.tuner else {}
        # What was loaded and nobody holds yet is given back at the first gradient; until then, all of it stands.
        loaded, takers, stands = self._loaded, self._takers, self._stands()
        moments = {**takers.unheld(loaded.moments), **takers.moments(copy)}
        moment = {"second_moment": moments} if moments else {}
        held = bool(self.held) and not stands
        due = {"due": True} if (any(one.due for one in takers.held) if held else loaded.due) else {}
        left = takers.left() if held else loaded.left
        unused = {"unused": left} if left else {}
        each = (takers.rates(), loaded.rates) if stands else (loaded.rates, takers.rates())
        rates = {name: followed for name, followed in {**each[0], **each[1]}.items() if followed}
        norms = {"norms": found} if (found := self._norms.state()) else {}
        added_to = takers.added_to() if self.met and not stands else loaded.added_to
        upon = {"added_to": added_to} if added_to else {}
        masks = self._masks.state() if self._masks else {}
        return tuned | self.scale.state() | moment | due | unused | rates | norms | upon | masks

    def check(self, state: Mapping[str, Any], residuals: str) -> None:
        """Refuse a state that could not be loaded; nothing is changed.

        Raises:
            ConfigError, CorruptFrameError: says what is wrong with it.
        """
        go_on = self.tuner.check if self.tuner else None
        checkpoint.check(self._reducer, self._methods, state, residuals, go_on)
        shapes = {name: local(parameter).shape for name, parameter in self.named}
        check_moments(state.get("second_moment", {}), shapes, needs=("steps", "since", "eps", "divides"))
        _check_unused(state.get("unused", {}))
        check_masks(state, dict(self.named))
        if residuals == "restore":
            self._takers.find_rates({name: state.get(name, ()) for name in (*Rates.saved, *LastRates.saved)})

    def load(self, state: Mapping[str, Any], residuals: str, *, begun: bool) -> None:
        """Take a state that :meth:`check` has found good.

        Args:
            begun: gradients have been exchanged, so that it is known whether a second moment is held.
        """
        if self.tuner:
            same = state.get("world") == self._reducer.world
            self.tuner.resume(checkpoint.saved_plan(state), same and bool(state.get("tuned")))
            self._take_order()
        if self._masks:
            self._masks.load(state)  # first: it says what there is room for
        checkpoint.restore(self._reducer, state, residuals)
        self._taken_back.loaded()
        self._norms.resume(state.get("norms", {}) if residuals == "restore" else {})
        for taker in self._takers:
            taker.resume()
        names = (*Rates.saved, *LastRates.saved) if residuals == "restore" else ()
        rates = {name: state.get(name, ()) for name in names}
        moments, left = state.get("second_moment", {}), state.get("unused", {})
        added_to = state.get("added_to", {})
        self._loaded = _Loaded(moments, bool(state.get("due")), left, rates, added_to, is_new=not begun)
        self._take_loaded()
        if begun:
            self.settle_moments()
        self.scale.load(0.0 if residuals == "reset" else float(state.get("scale", 0.0)))


_OF_UNUSED = {"count": int, "all_exact": bool, "last_exact": bool}


def _check_unused(saved: object) -> None:
    """Refuse what is not what :meth:`.held.HeldSecondMoment.left` returns.

    Raises:
        StateError: it is none.
    """
    each = list(saved.values()) if isinstance(saved, Mapping) else [None]
    for one in each:
        given = dict(one) if isinstance(one, Mapping) else {}
        until, due = given.pop("exact_until", 0), given.pop("due", False)
        fits = {name: type(value) for name, value in given.items()} == _OF_UNUSED and type(until) is int
        if not fits or type(due) is not bool or min(given["count"], until) < 0 or not given["count"] + until + due:
            raise StateError(
                "unused exchanges in a state should be a count and two flags by name, the number of a step where "
                f"rounds are exact until then, and a flag where others have none due, got {saved!r:.100}"
            )
