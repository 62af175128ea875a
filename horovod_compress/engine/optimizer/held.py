"""A second moment that is held: what lets Adam learn from compressed gradients as from exact ones.

Adam divides by the root of a running mean of squares. Compressed gradients carry what earlier steps left and what the
code rounds off, and both enter that mean as if they were gradient: the steps become smaller, and differ from element
to element. Here the second moment moves in exact rounds, which are few, and is held in between:

    exact round    r = the ranks' mean gradient, in 16 or 8 bits;  V = b2^n V + (1 - b2^n) r^2, n steps since the last
                   one, or fewer, so that V forgets at most a tenth
    other rounds   r = c * decode(encode(gradient / c)),  c = sqrt(V / (1 - b2^s)) + eps, at least 0.3 of its tensor's

Of elements that were left out until then, r is a sum, and counts for one step. Where r is far larger than usual, see
:mod:`.surges`; where no exact round has seen a gradient yet, :mod:`.beginnings`. What V is and how torch comes to
divide by it is in :mod:`.second_moment`. (Kin to 1-bit Adam, Tang et al. 2021, section 3, where V is frozen for good.)
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.checksums import hash_of
from ..reducer import Next, Reducer
from ..shards import local
from . import family, rare_rows, second_moment as moments, step_hooks
from .adam import AdamStepping
from .beginnings import Beginnings
from .exact_rounds import ExactRounds
from .held_moment import HeldMoment, Left, loaded, note_units
from .second_moment import BRIEF, Slot
from .surges import Result, surges


class Standing(NamedTuple):
    """How far an optimizer is with a parameter, before a step.

    Attributes:
        group, state: those of the optimizer; it may have no state yet.
        steps: so many has the optimizer done with it; None without a state.
        late: its second moment begins later than others, or anew.
        coded: so that a coded gradient may be all that is in it.
    """

    group: dict[str, Any]
    name: str
    state: Any
    steps: float | None
    late: bool
    coded: bool


_log = logging.getLogger("horovod_compress")


class HeldSecondMoment:
    """Holds the second moment of an optimizer, one of :mod:`.family`, and tells codecs what to divide by.

    Args:
        optimizer: only its state is written.
        named: its parameters by name, as the reducer has them.
        rounds: the exact ones.
        steps: move weights here where that is possible, in place of the optimizer's own step.

    Attributes:
        reducer: the one it was given.
        rounds: likewise.
        beginnings: until when these are exact because second moments begin.
        stepping: what moves weights here, None where nothing does.
        exact: the exchanges for the optimizer's coming step are exact where the second moment divides.
        due: an exact round is due, and no step of the optimizer has used one yet. It begins with the first exchange
            for a step: where there are several, all of them are exact, or none. After an exchange that the optimizer
            does not use, as a scaler skips its step, the next one counts as another for the same step.
    """

    def __init__(
        self,
        optimizer: Any,
        reducer: Reducer,
        named: Mapping[str, nn.Parameter],
        rounds: ExactRounds,
        steps: bool = False,
    ) -> None:
        self._optimizer, self.reducer = optimizer, reducer
        self._parameters = partial(moments.places, optimizer, moments.names_of(named.items()))
        self._kept, self._buckets = reducer.kept, reducer.buckets
        self._form = family.form_of(optimizer)
        self.rounds, self.beginnings = rounds, Beginnings(rounds, tells=reducer.rank == 0)
        self._held: dict[str, HeldMoment] = {}
        self._rest = self._buckets.rest  # what the zero groups of what is held go with
        self._prepared = reducer.step - 1  # the last step that it has used
        self.due = False
        self.exact = False
        self._all_exact = False  # all exchanges for the optimizer's coming step; others may make theirs more often
        self._shown = ""  # see shown(); empty where that has changed
        self._told = False  # that exact rounds do not wait for it
        self.stepping: AdamStepping | None = AdamStepping(optimizer, self._parameters) if steps else None

    def settings(self) -> str:
        """Return what has to be equal on every rank, in words."""
        begun = f", of step {self.reducer.step} ({self.shown()}{self._stand_ins()})" if self._held else ""
        names = sorted(name for _, _, name in self._parameters())
        which = (
            f"{len(names)} parameters of {type(self._optimizer).__name__} ({zlib.crc32(','.join(names).encode()):08x})"
        )
        due = ", with an exact round due" if self.due else ""
        return f"shared with {self.rounds}{begun}{due}, of {which}"

    def shown(self) -> str:
        """Return what is held, for a comparison with other ranks; the work is done after it has changed only."""
        each = [held for _, held in sorted(self._held.items())]
        if not self._shown:
            numbers = [[held.steps, held.since, held.eps, held.divides] for held in each]
            value = hash_of([*(held.moment for held in each), torch.tensor(numbers, dtype=torch.float64, device="cpu")])
            eps, since = sorted({held.eps for held in each}), sorted({held.since for held in each})
            self._shown = f"of {len(each)} parameters, after steps {since}, with eps {eps}, by its hash {value:016x}"
        usual = array("d", [held.usual for held in each])
        return f"{self._shown}, beside results by theirs {zlib.crc32(usual):08x}"

    def _stand_ins(self) -> str:
        """Return what stands in for it in rows: no result depends on that, and to look at it waits for a GPU."""
        each = [one for _, held in sorted(self._held.items()) if (one := held.stand_in) is not None and bool(one.any())]
        return f", in some rows with {hash_of(each):016x} in its place" if each else ""

    @cached_property
    def _sparse(self) -> frozenset[str]:
        """The parameters of which a round may send some elements only."""
        names = enumerate(self._buckets.plan.names())
        return frozenset(name for index, name in names if self._buckets.sends_some(index))

    def is_exact(self, step: int) -> bool:
        """Return whether an exact round is due from this exchange on."""
        return step in self.rounds

    def is_due(self, step: int) -> bool:
        """Return whether one is due in this exchange."""
        return self.due or self.is_exact(step) or step < self.beginnings.until or self.reducer.norms.ratio.stale

    # ---- state ----

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {name: held.state() for name, held in self._held.items()}

    def left(self, *, due: bool) -> dict[str, Left]:
        """Return what exact rounds are due for, by the first name of a parameter; empty where nothing is.

        That is what the optimizer has left unused of exchanges, and second moments that begin later than others; with
        ``due``, also whether one is due that not all optimizers wait for.
        """
        step = self.reducer.step
        count, until = self.unused(step), self.beginnings.saved(step)
        first = min((name for _, _, name in self._parameters()), default="")
        more = ({"exact_until": until} if until else {}) | ({"due": True} if due and self.due else {})
        mine = {"count": count, "all_exact": self._all_exact, "last_exact": self.exact} | more
        return {first: mine} if count or more else {}

    def load_state_dict(
        self,
        state: Mapping[str, Mapping[str, Any]],
        due: bool = False,
        left: Mapping[str, Left] = MappingProxyType({}),
    ) -> None:
        """Restore what :meth:`state_dict` and :meth:`left` returned, beside what waits in the units that go with it."""
        unused = next((left[name] for _, _, name in self._parameters() if name in left), {})
        self.due = due or unused.get("due", False)
        self._all_exact, self.exact = unused.get("all_exact", False), unused.get("last_exact", False)
        self._prepared = self.reducer.step - 1 - unused.get("count", 0)
        if self.stepping:
            self.stepping.pay()  # what is held now may be of another time
        where = {name: parameter.device for _, parameter, name in self._parameters()}
        mine = {name: saved for name, saved in state.items() if name in where}
        self.beginnings.load(unused.get("exact_until", 0), self.reducer.step, held=bool(mine))
        groups = self._kept.withholding.zero_groups()
        self._held = {name: loaded(saved, where[name], groups[name]) for name, saved in mine.items()}
        self._shown = ""

    # ---- before the first gradient of a step ----

    def note_round(self, step: int, *, exact: bool, due: bool) -> None:
        """Note what the coming step exchanges, and whether all exchanges for the optimizer's coming step are exact."""
        self._all_exact = exact and (self._all_exact or not self.unused(step))
        self.exact, self.due = exact, due

    def look(self, step: int) -> list[Standing]:
        """Look at the parameters before a step, and for second moments that begin later than others, or anew."""
        states = [(slot, self._optimizer.state.get(slot[1])) for slot in self._parameters()]
        done = {slot[2]: self._form.steps(slot[0], state) if state else None for slot, state in states}
        late = self.beginnings.look(step, done, self._held, self._buckets.divides())
        found = [
            Standing(group, name, state, done[name], name in late, late.get(name, False))
            for (group, _, name), state in states
        ]
        # What waits is of the first coded gradient, and of those before the optimizer had the parameter, perhaps many.
        self._kept.scale_errors({one.name: 0.0 for one in found if one.late and one.name not in self._held})
        return found

    def settle(self, found: Sequence[Standing], factors: dict[str, Tensor]) -> None:
        """Take over what the optimizer has moved itself until now, and leave what is of another time.

        Args:
            found: what :meth:`look` returned.
            factors: what waits is multiplied by these, by tensor; more are noted.
        """
        divides = self._buckets.divides()
        zeros: dict[str, int] = {}
        if self._rest is not self._buckets.rest:  # other weights are pruned
            self._rest, zeros = self._buckets.rest, self._kept.withholding.zero_groups()
            for name, known in self._held.items():
                known.regroup(zeros[name])
        for group, name, state, done, late, coded in found:
            held = self._held.get(name)
            # The schedule leaves its bucket uncompressed now; or the optimizer is of an earlier step than what is held.
            waits_by = None
            if held and (divides[name] == "never" or done is None or done < held.since):
                held, self._shown, waits_by = None, "", self._held.pop(name).divisor
                if self.stepping:
                    self.stepping.pay([name])
                note_units(factors, name, waits_by, None)
            if held or not done or divides[name] == "never" or (self.exact and not late):
                continue
            zeros = zeros or self._kept.withholding.zero_groups()  # it has moved its own until now
            (moment, steps), before = self._form.taken_over(group, state), divides[name] == "before"
            held = HeldMoment(moment, BRIEF if coded else steps, steps, float(group["eps"]), before, zeros[name])
            held.begin_stand_in()
            self._held[name], self._shown = held, ""
            note_units(factors, name, waits_by, held.divisor)
        if not self.exact:
            self.beginnings.until = 0

    def names(self) -> Collection[str]:
        """Return the parameters whose second moment is held."""
        return self._held.keys()

    def divisors(self) -> dict[str, Tensor]:
        """Return what gradients are divided by, by name."""
        return {name: held.divisor for name, held in self._held.items() if held.divisor is not None}

    def unmoved(self) -> dict[str, Tensor]:
        """Return the elements that coded rounds leave out, by name."""
        return {name: held.unmoved for name, held in self._held.items() if held.unmoved is not None}

    def unused(self, step: int) -> int:
        """Return how many of the last exchanges before a step the optimizer has not used."""
        return max(0, step - 1 - self._prepared)

    def rests(self, step: int) -> bool:
        """Return whether the optimizer has left more exchanges unused than lie between two exact rounds.

        One that has never made a step is not waited for after the warm-up: there is nothing to hold of it.
        """
        unused = self.unused(step)
        return unused > self.rounds.every or (not self.beginnings.begun and unused >= self.rounds.warmup)

    def tell_of_rest(self, step: int) -> None:
        """Say once, on rank 0, that exact rounds go on without this optimizer."""
        if not self._told and self.reducer.rank == 0:
            _log.warning(
                "%s has used none of the last %d exchanges, and others have: exact rounds no longer wait for it, until "
                "it makes steps again; let all optimizers of a compression make a step after each exchange",
                *(type(self._optimizer).__name__, self.unused(step)),
            )
        self._told = True

    # ---- before the optimizer's own step ----

    def leave(self) -> None:
        """Let the optimizer's state be as torch alone would have it, and torch do all further steps."""
        if self.stepping:
            self.stepping.end()
            self.stepping = None

    def moved_here(self) -> frozenset[str]:
        """Return the parameters that :meth:`prepare` moves itself in the coming step; the others are torch's."""
        if self.stepping is None:
            return frozenset()
        step, reducer = self.reducer.next_step() - 1, self.reducer
        return self.stepping.moved_here(step, self._prepared, reducer.settled, self._held)

    @torch.no_grad()
    def prepare(self, here: Collection[str] = (), ratios: Mapping[str, float] = MappingProxyType({})) -> None:
        """Set the state of the optimizer so that its own step divides by what is held, or do this step.

        Args:
            here: see :meth:`moved_here`.
            ratios: what their gradients count times, unless that is 1.
        """
        step = self.reducer.next_step() - 1
        if not step_hooks.ready(self._optimizer, step, self._prepared, self.reducer.settled):
            return
        self._prepared = step
        overflow = getattr(self._optimizer, "found_inf", None)  # a gradient scaler leaves it to a fused step to skip
        if overflow is not None and bool(overflow):
            return
        used = [slot for slot in self._parameters() if self._is_used(slot)]
        exact = self._take_in(step, used, ratios)
        for group, parameter, name in used:
            held, state, by = self._held[name], self._optimizer.state[parameter], ratios.get(name, 1.0)
            now = self._form.steps(group, state) + 1
            if self.stepping and name in here:
                self.stepping.add((group, parameter, name), held, now, exact=name in exact, by=by)
            else:
                grad = self._form.gradient(self._optimizer, group, parameter, by)
                self._form.write(group, state, grad, held, now, exact=name in exact)
        self.due = self.due and not self._all_exact
        if self.stepping:
            self.stepping.step(step)

    def _take_in(self, step: int, used: Sequence[Slot], ratios: Mapping[str, float]) -> Collection[str]:
        """Let what is held take in exact gradients, first ones and surges; return whose gradient is exact."""
        exact, factors, first, surging = set[str](), dict[str, Tensor](), list[str](), frozenset[str]()
        scale = float(getattr(self._optimizer, "grad_scale", None) or 1.0)  # of a fused step, see Form.gradient()
        if not self._all_exact:
            first = self.beginnings.look_at_zeros(step + 1, [(n, p.grad, self._held[n]) for _, p, n in used])
            surging = self._surges(used, ratios, scale)
        for group, parameter, name in used:
            held, state, by = self._held[name], self._optimizer.state[parameter], ratios.get(name, 1.0)
            now, coded = self._form.steps(group, state) + 1, held.is_coded or name in first
            steps = 1.0 if coded else now - held.since if self._all_exact else float(name in surging)
            if coded and name not in first and not bool(local(parameter.grad).any()):  # type: ignore[arg-type]
                continue  # of coded gradients alone, it waits for an exact one that says something
            grad = self._form.gradient(self._optimizer, group, parameter, by) if steps > 0 else None
            if grad is not None and bool(grad.isfinite().all()):
                before = held.divisor
                if coded and self._all_exact:
                    self._form.forget(held, group)
                    self._form.clear_first(state)  # divided by V now, it could be any size
                    self._form.move(held, group, grad, steps)
                elif coded:
                    self._form.take_coded(held, group, grad)
                else:
                    counts = moments.counted(self._form.betas(group)[1], steps)
                    grad = held.once(grad, counts) if self._all_exact else held.like(grad)
                    self._form.move(held, group, grad, counts)
                held.since, self._shown = now if coded else held.since + steps, ""
                note_units(factors, name, before, held.divisor)
                if self._all_exact:
                    exact.add(name)
            if not held.is_coded:
                rare_rows.take_in(self._form, held, group, state, parameter, now, by / scale)
        self._kept.convert(factors)
        return exact

    def _is_used(self, slot: Slot) -> bool:
        """Return whether the coming step divides by what is held; sparse gradients are exact, and the optimizer's."""
        _, parameter, name = slot
        grad = parameter.grad if name in self._held and self._optimizer.state.get(parameter) else None
        return grad is not None and not grad.is_sparse

    def _surges(self, used: Iterable[Slot], ratios: Mapping[str, float], scale: float) -> frozenset[str]:
        """Return whose coded results are far larger than usual, see :mod:`.surges`."""
        results = []
        for _, parameter, name in used:
            grad, held = parameter.grad, self._held[name]
            if grad is not None and held.moment.numel() and name not in self._sparse:
                results.append(Result(name, local(grad), ratios.get(name, 1.0) / scale, held))
        return surges(results)


@torch.no_grad()
def begin(several: Sequence[HeldSecondMoment], step: int) -> None:
    """Choose what a step exchanges, before its first gradient, and show codecs what to divide by.

    Args:
        several: of one compression: a round is exact for all of them, or for none. Each has its own due, or those that
            step in turn would have one for ever; so would one that makes no steps, and is not waited for.
    """
    first = several[0]
    reducer, rounds = first.reducer, first.rounds
    buckets, kept, start = reducer.buckets, reducer.kept, reducer.start
    looks = [held.look(step) for held in several]
    awaited = [held for held in several if not held.rests(step)] or several
    due = any(held.is_due(step) for held in awaited)
    if (first.exact or due) and rounds.every > 1:
        # A rank whose optimizer did not use the last exchange may have another kind of round now, and frames of
        # another length, which Gloo does not bear: so compare first.
        start.again()
    # If no optimizer has used the last exchange, this is another one for the same step.
    exact = first.exact if all(held.unused(step) for held in several) else due
    for held in several:
        if held not in awaited:
            held.tell_of_rest(step)
        held.note_round(step, exact=exact, due=held in awaited and held.is_due(step))
    if rounds.every == 1:  # it is the stock optimizer
        buckets.choose(Next("plain"))
        return
    buckets.choose(Next(("first" if rounds.asked <= step < rounds.short else "exact") if exact else "coded"))
    if exact and reducer.watch:
        reducer.watch.spoil()  # what is measured now says nothing of the method
    factors: dict[str, Tensor] = {}
    for held, found in zip(several, looks, strict=True):
        held.settle(found, factors)
    kept.convert(factors)
    buckets.divide_by({name: divisor for held in several for name, divisor in held.divisors().items()})
    kept.withholding.withhold({name: index for held in several for name, index in held.unmoved().items()})
