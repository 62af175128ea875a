"""Takes out what results were handed back times, before an optimizer's step: see :mod:`..norms`.

Between the exchange and the step, a program sees gradients of the exact mean's norm, and may clip them. The step gets
what the code made, times the program's clipping. So the path from gradient to weights stays linear, and the optimizer's
state in units of gradients.

Only a multiple of what was handed back is in these units. A program that adds something to ``p.grad``, such as its own
weight decay, is told so once: a few elements are compared in some steps.
"""

from __future__ import annotations

import logging
import math
import operator
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import dropwhile, islice
from typing import Any

import torch
from torch import Tensor, nn

from ...codecs.work import together
from ..norms import some
from ..reducer import Reducer
from ..shards import is_divided, local
from . import second_moment as moments
from .spikes import Spikes
from .step_hooks import ready

_log = logging.getLogger("horovod_compress")

#: So many of twice as many exchanges on top of earlier results are a habit. One may be a step that a program skips.
OFTEN = 4

_DROPPED = (
    "the results of %d of the last %d exchanges were dropped without a step of the optimizer, as a program drops what "
    "the generator's pass of a GAN brings for its discriminator, or skips steps whose loss or gradient is too large. "
    "Such exchanges count all the same: what they left unsent goes into the next step's results, and what they sent of "
    "the residual is lost. Gradients that no step is to use need not be exchanged: set requires_grad_(False) for that "
    "pass or, without Horovod, run it within compression.no_sync(). If the program skips steps, or uses these results "
    "itself, nothing is wrong"
)

_BY_ANOTHER = (
    "%s makes steps with results of this compression, which does not know it: nothing sees to its momentum or second "
    "moment, and the ratio of norms stays in its gradients. Give all optimizers of a model to one compression; for "
    "another phase of training, close() it, and create another compression for the new optimizer; for sharpness-aware "
    "minimization, see docs/usage.md"
)


class Matching:
    """Takes the ratio of norms out of what one optimizer is given.

    Args:
        named: the parameters that are exchanged, of any optimizer, by name as the reducer has them.
        scale: returns the scale of the gradient scaler that is followed, 1 for none.

    Attributes:
        other: the class of an optimizer that nobody has told of, and that has made a step with results.
    """

    other: str | None = None

    def __init__(
        self, optimizer: Any, reducer: Reducer, named: Mapping[str, nn.Parameter], scale: Callable[[], float]
    ) -> None:
        self._optimizer, self._reducer, self._scale = optimizer, reducer, scale
        self._norms, self._start, self._failure = reducer.norms, reducer.start, reducer.failure
        self._spikes = Spikes(reducer, named, scale)
        self._places = partial(moments.places, optimizer, moments.names_of(named.items()))
        self._taken = reducer.step - 1
        self._told = self._told_off = self._told_dropped = False
        # Of the last exchanges, whether no step had used their results when others came, upon them or not.
        self._added_to: deque[bool] = deque(maxlen=2 * OFTEN)
        self._dropped: deque[bool] = deque(maxlen=2 * OFTEN)
        self._follow(self._mine())

    def _follow(self, mine: frozenset[str]) -> None:
        self._followed = mine
        self._norms.follow(mine, by=id(self._optimizer))
        mine_is_unused = weakref.WeakMethod(self._is_unused)  # what hooks of torch's refer to stays

        def is_unused() -> bool:
            found = mine_is_unused()
            return bool(found and found())

        self._cleared = Cleared([parameter for _, parameter, _ in self._places()], is_unused)

    def _is_unused(self) -> bool:
        """Return whether results were handed back that no step of the optimizer has used, and no step is under way."""
        last = self._norms.given
        if last is None or not last.sound or last.step <= self._taken:
            return False
        return not self._norms.ratio.off and not self._failure.closing and self._reducer.idle()

    def note_step_of(self, other: str) -> None:
        """Note an optimizer that nobody has told of, before its step, if it is to use what was handed back.

        A step of its own, as after ``no_sync()``, says nothing of results.
        """
        if self._is_unused():
            self.other = other

    def _mine(self) -> frozenset[str]:
        return frozenset(name for _, _, name in self._places())

    def state(self) -> dict[str, list[bool]]:
        """Return what :meth:`load` takes, by the first name of a parameter; empty where nothing was added to."""
        last, found = self._norms.given, [*self._added_to]
        if last is not None and last.sound:
            found.append(False)  # a step has used the last results, or what is saved lacks them
        found = [*dropwhile(operator.not_, found[-2 * OFTEN :])]  # those before count for nothing
        return {min(self._followed): found} if found and not self._norms.ratio.off else {}

    def load(self, saved: Mapping[str, Sequence[bool]]) -> None:
        """Go on with whatever was loaded, and what :meth:`state` had returned of it."""
        self._taken = self._reducer.step - 1
        self._dropped.clear()
        self._added_to.clear()
        mine = self._mine()  # a group may have been added since the last step began
        self._added_to.extend(next((saved[name] for name in saved if name in mine), ()))

    @torch.no_grad()
    def begin(self) -> None:
        """Before a step: see that the results of the last one are not part of new gradients.

        Where a program has several exchanges for one step of its optimizer and does not clear gradients in between, the
        next one takes in what was handed back, with gradients that are not of its size.
        """
        norms, last = self._norms, self._norms.given
        self._cleared.begin()
        if (mine := self._mine()) != self._followed:  # a group was added, which ranks compare
            self._follow(mine)
            self._start.again()
        if norms.ratio.off:
            self._tell_off()
            return
        unused = last is not None and last.step > self._taken
        if last is None or not last.sound:
            if unused:  # a program that skips such a step drops a spike beside what was not finite
                self._spikes.clip()
            return
        kept = unused and self._cleared.most_kept()
        self._added_to.append(kept)
        # What was not coded, such as sparse gradients, leaves nothing to be lost, and no step has to wait for it.
        dropped = unused and not kept
        self._dropped.append(dropped and not self._followed.isdisjoint(last.coded))
        if dropped:
            self._spikes.drop(self._followed, last.coded)
        if sum(self._added_to) >= OFTEN:
            norms.vote_against()
        if sum(self._dropped) >= OFTEN and not self._told_dropped:
            self._tell_dropped(last.step)

    def _tell_dropped(self, step: int) -> None:
        if not (self.other or keeps(self._reducer, step)):
            return
        if not self._reducer.rank:
            given = (_BY_ANOTHER, self.other) if self.other else (_DROPPED, sum(self._dropped), len(self._dropped))
            _log.warning(*given)
        self._told_dropped = True

    def _tell_off(self) -> None:
        if not self._told_off and not self._reducer.rank:
            _log.warning(
                "gradients are exchanged several times for one step of the optimizer, on top of earlier results, so "
                "compressed gradients are handed back without the norm of the exact mean, which clipping would need; "
                "accumulate with no_sync() or backward_passes_per_step=, and exchange once for each step"
            )
        self._told_off = True

    @torch.no_grad()
    def take_out(self, but: Collection[str] = ()) -> dict[str, float]:
        """Before the optimizer's own step, let its gradients be what the code made, times the program's clipping.

        Args:
            but: parameters whose gradients stay as they are.

        Returns:
            What those have yet to be multiplied by, unless that is 1.
        """
        step, given = self._reducer.next_step() - 1, self._norms.given
        if not ready(self._optimizer, step, self._taken, self._reducer.settled) or given is None:
            return {}
        self._taken = step
        if given.step != step:
            return {}
        self._spikes.look(self._followed)
        if given.factor == 1.0:
            return {}
        if self._norms.samples:
            found = self._grads(given.names)
            self._look({name: grad for name, grad in found.items() if not grad.is_sparse}, self._norms.samples)
        by, moved = 1 / given.factor, given.names.intersection(but)
        others = [*self._grads(given.names - moved).values()] if len(moved) < len(given.names) else []
        if dense := [grad for grad in others if not grad.is_sparse]:
            torch._foreach_mul_(dense, by)
        for grad in others if len(dense) < len(others) else ():
            if grad.is_sparse:  # with sparse_as_dense, Horovod makes dense results sparse again
                grad.mul_(by)
        return dict.fromkeys(moved, by)

    def _grads(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return the gradients of some parameters, where they have one."""
        return {n: local(grad) for _, p, n in self._places() if n in names and (grad := p.grad) is not None}

    def _look(self, grads: Mapping[str, Tensor], samples: Mapping[str, Tensor]) -> None:
        """Tell once of a program that has done anything but make gradients smaller, or multiply them."""
        if self._told or self._reducer.rank:
            return
        unscaled = 1 / (self._scale() or 1.0)
        names = [name for name in grads if name in samples]
        before = _on_host([samples[name] for name in names])
        after = _on_host([some(grads[name]) for name in names])
        for name, was, now in zip(names, before, after, strict=True):
            if _was_added_to(was, now, torch.finfo(samples[name].dtype).eps, unscaled):
                self._told = True
                given = self._norms.given
                _log.warning(
                    "something was added to the gradient of %s between the exchange and the optimizer's step, such as "
                    "the program's own weight decay or noise. Compressed gradients are handed back with the norm of "
                    "the exact mean, and multiplied by %.3g before the step, and so is what was added: give it to the "
                    "optimizer (weight_decay=), put it into the loss, or choose match_norm=False",
                    *(name, 1 / given.factor if given else 1.0),
                )
                return


def keeps(reducer: Reducer, step: int) -> bool:
    """Return whether the coded rounds of a step have a residual, or anything else that goes on."""
    rounds = [state.round(step) for state in reducer.buckets]
    return any(not one.exact and one.work.state for one in rounds)


# ---- whether gradients were cleared ----


class Cleared:
    """Whether a program has cleared its gradients since results were handed back, as seen where passes add to them.

    When a step begins, its pass has filled some gradients: the first one, or a bucket of DistributedDataParallel; and
    passes without an exchange before it have filled all. So autograd says what there is before it adds to the first,
    the middle and the last of the parameters. Those that ranks have parts of get their gradients past autograd: there,
    what there is when the step begins has to do.

    Args:
        parameters: of one optimizer.
        is_unused: returns whether results were handed back that nobody has used, and no step is under way.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], is_unused: Callable[[], bool]) -> None:
        self._parameters, self._is_unused = parameters, is_unused
        #: Of each backward pass since the last step began, whether gradients were there when it came to them.
        self._passes: dict[int, list[bool]] = {}
        self._before: list[list[bool]] = []  # the same of those before that
        found = [at for at, p in enumerate(parameters) if p.requires_grad and not is_divided(p)]
        for place in {0, len(found) // 2, len(found) - 1} if found else ():
            hook: Any = partial(_come_upon, weakref.ref(self), found[place])
            hook.__torch_unserializable__ = True  # nobody is to be warned that another process does without it
            weakref.finalize(self, parameters[found[place]].register_hook(hook).remove).atexit = False

    @torch.no_grad()
    def look(self, at: int) -> None:
        """Look at the gradient of one of the parameters, which autograd is about to add to."""
        if self._is_unused():
            filled = _filled([self._parameters[at]]) == 1
            self._passes.setdefault(torch._C._current_graph_task_id(), []).append(filled)

    def begin(self) -> None:
        """Begin a step, within its pass."""
        self._before, self._passes = [*self._passes.values()], {}

    def most_kept(self) -> bool:
        """Return whether most gradients still had what was handed back, in all passes up to the step that begins."""
        if self._before:
            return all(2 * sum(found) > len(found) for found in self._before)
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        return 2 * _filled(trained) > len(trained)


def _come_upon(cleared: weakref.ref[Cleared], at: int, grad: Tensor) -> None:
    if found := cleared():
        found.look(at)


def _filled(parameters: Sequence[nn.Parameter]) -> int:
    """Return how many have a gradient that is not all zeros."""
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return sum(map(bool, together([True if grad.is_sparse else grad.any() for grad in grads])))  # one wait on a GPU


# ---- whether something was added to results ----


def _on_host(parts: Sequence[Tensor]) -> list[list[float]]:
    """Return the values of parts of gradients; waits once for a GPU."""
    if len({part.device for part in parts}) > 1:
        return [part.double().tolist() for part in parts]
    values = iter(torch.cat([part.double() for part in parts]).tolist()) if parts else iter(())
    return [[*islice(values, len(part))] for part in parts]


def _was_added_to(was: Sequence[float], now: Sequence[float], eps: float, unscaled: float) -> bool:
    """Return whether values were changed by anything but clipping, of any kind, and a factor for all of them.

    Args:
        eps: of their dtype.
        unscaled: what a gradient scaler has multiplied them by.
    """
    close, pairs = 16 * eps, [*zip(was, now, strict=True)]
    if not all(map(math.isfinite, (*was, *now))):
        return False
    if any(before == 0 and after != 0 for before, after in pairs):
        return True
    factors = sorted(after / before for before, after in pairs if before)
    if not factors:
        return False
    least, most, middle = factors[0], factors[-1], factors[(len(factors) - 1) // 2]
    if least < 0:
        return most > least * (1 - close)  # not even all of them negated
    limit = unscaled if middle < 2 * unscaled < 1.0 else max(1.0, unscaled)
    return most - least > close * most and most > limit * (1 + close)
